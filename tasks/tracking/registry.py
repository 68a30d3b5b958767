"""The model registry: one version per promoted snapshot, with its lineage.

A version has the snapshot's files at its root, so that `AutoModelForCausalLM.from_pretrained` and vLLM load what
`models:/NAME@champion` downloads; LINEAGE_FILES are in `lineage/`, their hashes in a tag. Two versions never have the
same model, but may share weights. A model registered again keeps its lineage and gets another in `lineage/2/` and so
on. The next call with the same model completes a killed one. No version is deleted here: its alias would go with it.
Writes need `aliases.lock_registry`.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tasks.core.files import atomic_folder, content_hash, read_json, write_json
from tasks.core.text import one_line
from tasks.models.files import LINEAGE
from tasks.tracking.connection import connect, experiment_id, mlflow_errors, or_none, paged, unless_there
from tasks.tracking.model_files import (
    OF_MLFLOW,
    Uploads,
    altered,
    refuse_altered_lineage,
    refuse_altered_model,
    remove_what_is_under_no_hash,
    store_folder,
)
from tasks.tracking.model_page import describe_model, link_version
from tasks.tracking.settings import TrackingSettings
from tasks.tracking.versions import CHAMPION, EARLIER_FILE, FILES_TAG, FOLDER_TAG, LINEAGE_FILES, Version

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

Content = TypeVar("Content")


class RegisteredTags(NamedTuple):
    """Of the registered model itself: its tags, and the version behind every alias."""

    tags: dict[str, str]
    aliases: dict[str, int]


class Registry:
    """The versions of one model. Every method raises ValueError with a remedy where MLflow cannot be reached."""

    def __init__(self, settings: TrackingSettings, model: str):
        self.settings, self.model = settings, model
        self.journal: Any = None  # as last read and verified (`journal.py`)
        self.is_locked = False  # by this process (`aliases.lock_registry`), so that nobody else writes the journal
        with mlflow_errors(settings):
            self.client = connect(settings)
        self._uploads = Uploads(self.client, model)

    @cached_property
    def experiment_id(self) -> str:
        """Where new files go; made on first use, so that reading makes nothing."""
        return experiment_id(self.client, self.settings)

    def champion(self) -> Version | None:
        return self.at(CHAMPION)

    def at(self, alias: str) -> Version | None:
        with mlflow_errors(self.settings):
            found = or_none(lambda: self.client.get_model_version_by_alias(self.model, alias))
        return as_version(found) if found else None

    def version(self, number: int) -> Version | None:
        """None where there is none, or it was deleted."""
        with mlflow_errors(self.settings):
            found = or_none(lambda: self.client.get_model_version(self.model, str(number)))
        return as_version(found) if found else None

    def _tagged(self, tag: str, value: str) -> list[Version]:
        with mlflow_errors(self.settings):
            found = self.client.search_model_versions(f"name = '{self.model}' and tag.{tag} = '{value}'")
        return sorted(map(as_version, found), key=lambda version: version.version)

    def exists(self, number: int | None) -> bool:
        return number is not None and self.version(number) is not None

    def versions(self) -> list[Version]:
        """All of them, by number: for what needs every one, since there may be thousands."""
        with mlflow_errors(self.settings):
            found = paged(lambda token: self.client.search_model_versions(f"name = '{self.model}'", page_token=token))
            return sorted(map(as_version, found), key=lambda version: version.version)

    def has_versions(self) -> bool:
        with mlflow_errors(self.settings):
            return bool(self.client.search_model_versions(f"name = '{self.model}'", max_results=1))

    def numbers(self) -> list[int]:
        return [version.version for version in self.versions()]

    def aliases(self, version: Version) -> list[str]:
        return sorted(alias for alias, number in (self.all_aliases() or {}).items() if number == version.version)

    def read_model(self) -> RegisteredTags | None:
        """None where there is no registered model of this name."""
        with mlflow_errors(self.settings):
            found = or_none(lambda: self.client.get_registered_model(self.model))
        aliases = {alias: int(number) for alias, number in found.aliases.items()} if found else {}
        return RegisteredTags(dict(found.tags), aliases) if found else None

    def all_aliases(self) -> dict[str, int] | None:
        """The version behind every alias; None where there is no registered model of this name."""
        model = self.read_model()
        return model.aliases if model else None

    def model_tags(self) -> dict[str, str]:
        model = self.read_model()
        return model.tags if model else {}

    def make_model(self) -> None:
        with mlflow_errors(self.settings):
            if self.read_model() is None:
                unless_there(lambda: self.client.create_registered_model(self.model))

    def with_weights(self, weights: str) -> list[Version]:
        """The versions with these weights, whatever other files they have; the first one first."""
        return self._tagged("weights_hash", weights)

    def find(self, folder_hash: str) -> Version | None:
        return next(iter(self._tagged(FOLDER_TAG, folder_hash)), None)

    def store(self, snapshot: Path, *, folder_hash: str, run_id: str | None) -> Any:
        """Upload the snapshot's files: slow, and without a lock. ValueError where their hash is not `folder_hash`."""
        with mlflow_errors(self.settings):
            existing, run = self.find(folder_hash), self._parent_of(run_id)
            registered = existing.model_id if existing else None
            return self._uploads.upload(snapshot, folder_hash, self.experiment_id, run, registered=registered)

    def register(
        self,
        snapshot: Path,
        *,
        weights: str,
        folder_hash: str,
        tags: Mapping[str, str],
        run_id: str | None,
        check: Callable[[], None],
        lineage: Path | None = None,
    ) -> Version:
        """A version of `snapshot`'s files and of the folder `lineage`, to which EARLIER_FILE may be added. The
        registered model must exist; `check` is called before each write and raises where none may be made. A model
        registered before keeps its version and gets new tags; `earlier` has those before. No lineage is overwritten.
        """
        model = self.store(snapshot, folder_hash=folder_hash, run_id=run_id)
        all_tags = {**tags, "weights_hash": weights, FOLDER_TAG: folder_hash, "files_bytes": _size(snapshot)}
        existing = self.find(folder_hash)
        with mlflow_errors(self.settings):
            if lineage:
                check()
                files = self._add_lineage(
                    existing.model_id if existing else model.model_id, lineage, existing, all_tags
                )
                all_tags = {FILES_TAG: json.dumps(files), **all_tags}  # first, since it leads to those before
                describe_model(self.client, model, lineage, run_id=self._parent_of(run_id), tags=tags)
            if existing:
                for name, value in all_tags.items():
                    if existing.tags.get(name) != value:
                        check()
                        self.client.set_model_version_tag(self.model, str(existing.version), name, value)
                return as_version(self.client.get_model_version(self.model, str(existing.version)))
            check()
            created = self.client.create_model_version(
                self.model, model.model_uri, run_id=self._parent_of(run_id), tags=all_tags, model_id=model.model_id
            )
            link_version(self.client, model, created)
        return as_version(created)

    def fetch(self, version: Version, folder: Path) -> Path:
        """The version's files in `folder`; ValueError, and no folder, where files are altered. Lineage only as the tags
        name it.
        """
        with atomic_folder(folder) as temporary:
            self._download_verified(version, temporary)
            refuse_altered_lineage(version, temporary, store=self.settings.artifact_location)
        return folder

    def fetch_model(self, version: Version, folder: Path) -> Path:
        with atomic_folder(folder) as temporary:
            self._download_verified(version, temporary)
            shutil.rmtree(temporary / LINEAGE, ignore_errors=True)
        return folder

    def _download_verified(self, version: Version, folder: Path) -> None:
        self._download(version, folder)
        refuse_altered_model(version, folder, store=self.settings.artifact_location)
        remove_what_is_under_no_hash(folder)

    def verify(self, version: Version) -> None:
        """ValueError where a version's files are not the registered ones; a local store is read in place."""
        with mlflow_errors(self.settings), TemporaryDirectory() as temporary:
            # None where somebody deleted it on MLflow's page: its files are still there.
            model = or_none(lambda: self.client.get_logged_model(version.model_id))
            folder = store_folder(model) if model else None
            if folder is None or not folder.is_dir():
                folder = Path(temporary)
                self._download(version, folder)
            refuse_altered_model(version, folder, store=self.settings.artifact_location)

    def missing_files(self, version: Version) -> str | None:
        """What is wrong with a version's files judging by their sizes, without fetching them; None if nothing."""
        from mlflow.artifacts import list_artifacts
        from mlflow.exceptions import MlflowException

        try:
            files = list_artifacts(f"models:/{self.model}/{version.version}")
        except (MlflowException, OSError) as error:
            return one_line(error)
        sizes = {file.path: file.file_size or 0 for file in files if not (file.is_dir or file.path in OF_MLFLOW)}
        if not any(size and path.endswith(".safetensors") for path, size in sizes.items()):
            return "its weights are gone"
        expected = version.tags.get("files_bytes", str(sum(sizes.values())))
        return None if expected == str(sum(sizes.values())) else "some of its files are gone or cut short"

    def read_lineage(self, version: Version, name: str, read: Callable[[Path], Content]) -> Content | None:
        """One of LINEAGE_FILES, as `read` reads it; None where the version has none. ValueError where altered."""
        assert name in (*LINEAGE_FILES, EARLIER_FILE)
        path = f"{version.lineage_folder}/{name}"
        expected = version.lineage_files.get(path)
        if expected is None:
            return None
        with TemporaryDirectory() as folder:
            file = self._fetched(version, f"/{path}", Path(folder))
            if not file.is_file() or content_hash(file) != expected:
                raise altered(version, path, store=self.settings.artifact_location)
            return read(file)

    def earlier(self, version: Version) -> list[Version]:
        """The version as registered before, with the tags and lineage of then; the latest first."""
        found: list[Version] = []
        while tags := self.read_lineage(found[-1] if found else version, EARLIER_FILE, read_json):
            found.append(replace(version, tags=tags))
        return found

    def _add_lineage(
        self, model_id: str, lineage: Path, existing: Version | None, tags: Mapping[str, str]
    ) -> dict[str, str]:
        """Store the files of `lineage` beside a model's, in an unused folder; returns the value of FILES_TAG."""
        if existing:
            before = {name: value for name, value in existing.tags.items() if name in {*tags, FILES_TAG}}
            write_json(lineage / EARLIER_FILE, before)
        # Also of a version that was deleted, or of a call that was killed.
        there = [Path(item.path).name for item in self.client.list_logged_model_artifacts(model_id, LINEAGE)]
        number = max((int(name) for name in there if name.isdecimal()), default=1) + 1
        prefix = f"{number}/" if there else ""
        self.client.log_model_artifacts(model_id, str(lineage), f"{LINEAGE}/{prefix}".rstrip("/"))
        return {f"{prefix}{file.name}": content_hash(file) for file in sorted(lineage.iterdir())}

    def _download(self, version: Version, folder: Path) -> None:
        source = self._fetched(version, "", folder)
        if not any(source.iterdir()):  # MLflow takes a missing folder for an empty one
            raise self._cannot_fetch(version, "its folder is missing or empty")
        for item in () if source.samefile(folder) else source.iterdir():
            shutil.move(item, folder / item.name)
        for file in folder.rglob("*"):  # the store's may be read-only
            if file.is_file():
                file.chmod(file.stat().st_mode | stat.S_IWUSR)

    def _fetched(self, version: Version, path: str, folder: Path) -> Path:
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        try:
            return Path(download_artifacts(f"models:/{self.model}/{version.version}{path}", dst_path=str(folder)))
        except (MlflowException, OSError) as error:
            raise self._cannot_fetch(version, one_line(error)) from error

    def _cannot_fetch(self, version: Version, reason: str) -> ValueError:
        return ValueError(
            f"{version.name} is registered, but its files cannot be fetched ({reason}), so nothing can be compared "
            f"with it. Restore {self.settings.artifact_location}, or `python -m tasks rollback` to another version."
        )

    def _parent_of(self, run_id: str | None) -> str | None:
        """The flow's run, the parent of a stage's run: it made the model."""
        if run_id is None:
            return None
        run = self.client.get_run(run_id)
        return str(run.data.tags.get("mlflow.parentRunId", run_id))


def _size(snapshot: Path) -> str:
    """Bytes of the files at the top of a folder, weights included: known without fetching."""
    return str(sum(file.stat().st_size for file in snapshot.iterdir() if file.is_file() and file.name not in OF_MLFLOW))


def as_version(found: ModelVersion) -> Version:
    model_id = str(found.source).removeprefix("models:/")
    return Version(found.name, int(found.version), found.tags.get("weights_hash", ""), dict(found.tags), model_id)
