"""Settings of storage on S3: `paths.remote` and the section `storage`. No stage reads them, so none runs again."""

from __future__ import annotations

from pydantic import Field, field_validator

from tasks.core.settings import Settings
from tasks.core.urls import is_url, parse_url


class PathsSettings(Settings):
    """`artifacts` is a local folder, which DVC caches. `remote` gets a copy of the results: an `s3://` URL, or null."""

    artifacts: str = Field(min_length=1)
    remote: str | None

    @field_validator("artifacts")
    @classmethod
    def _is_local(cls, artifacts: str) -> str:
        if is_url(artifacts):
            raise ValueError(
                "it must be a local folder, since DVC caches and links what is in it. Name the bucket in paths.remote, "
                "which gets a copy of the results"
            )
        return artifacts

    @field_validator("remote")
    @classmethod
    def _is_a_url(cls, remote: str | None) -> str | None:
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
