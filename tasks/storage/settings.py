"""Settings of storage on S3: `paths.remote` and the section `storage`. No stage reads them, so none runs again."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from tasks.core.custom_code import CUSTOM
from tasks.core.settings import LocalFolder, Settings
from tasks.core.urls import is_url, parse_url

OWN_FOLDERS = ("tasks", "flows", "infra", "tests", ".git", ".dvc", ".venv")  # of the project


def _refuse_own_folder(folder: Path) -> None:
    """ValueError for a folder of code or of git's, and for one that the project is in: results are replaced whole."""
    place, project = folder.resolve(), Path().resolve()
    own = next((name for name in OWN_FOLDERS if place.is_relative_to((project / name).resolve())), None)
    if own is not None or project.is_relative_to(place):
        what = f"is in the project's own folder {own}" if own else "contains the project itself"
        raise ValueError(
            f"{str(folder)!r} {what}, where results would be among what a run reads and replace files. Name a "
            f"folder of its own, such as artifacts"
        )


class PathsSettings(Settings):
    """`artifacts` is a local folder, which DVC caches. `custom` has the user's code and data, which stages watch:
    tasks/custom, or a folder in it where several agents share the code. `remote` gets a copy of the results: an `s3://`
    URL, or null.
    """

    artifacts: LocalFolder
    custom: str
    remote: str | None

    @field_validator("artifacts")
    @classmethod
    def _check_artifacts(cls, artifacts: str) -> str:
        if is_url(artifacts):
            raise ValueError(
                "it must be a local folder, since DVC caches and links what is in it. Name the bucket in paths.remote, "
                "which gets a copy of the results"
            )
        _refuse_own_folder(Path(artifacts))
        return artifacts

    @field_validator("custom")
    @classmethod
    def _check_custom(cls, custom: str) -> str:
        parts = custom.split("/")
        if parts[:2] != [*CUSTOM.parts] or not all(map(str.isidentifier, parts)):
            raise ValueError(
                f"{custom!r} is not {CUSTOM} or a folder in it, whose names are such that Python can import what is "
                f"there, so no stage could watch it. Write {CUSTOM}, or {CUSTOM}/my_agent"
            )
        return custom

    @field_validator("remote")
    @classmethod
    def _check_remote(cls, remote: str | None) -> str | None:
        if remote is not None and parse_url(remote).sha256 is not None:
            raise ValueError("it is a folder that results are written to, so it has no hash. Leave #sha256=… out")
        return remote


class StorageSettings(Settings):
    """How S3 is reached. Keys and tokens come from where boto3 finds them (environment, ~/.aws, the machine's role),
    never from here. `endpoint_url`: of a server that is not AWS; null is what boto3 finds (AWS_ENDPOINT_URL_S3), else
    AWS. A request is tried `max_attempts` times. `finish_seconds`: how long the end of a stage waits for an upload.
    """

    endpoint_url: str | None = Field(pattern=r"^https?://[^\s/?#]+(:\d+)?/?$")
    max_attempts: int = Field(ge=1)
    connect_timeout_seconds: float = Field(gt=0)
    read_timeout_seconds: float = Field(gt=0)
    max_concurrency: int = Field(ge=1)
    finish_seconds: float = Field(ge=0)


class StorageSections(Settings):
    paths: PathsSettings
    storage: StorageSettings
