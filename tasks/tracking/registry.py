"""The model registry: one version a promoted snapshot, and the alias that says which one is in production.

A version holds the snapshot's files at its root, so `models:/NAME@champion` downloads into a folder that
`AutoModelForCausalLM.from_pretrained` loads as is. Two versions never hold the same weights. Registering goes in small
steps (files, then the version with all its tags at once, then the alias); a killed call leaves a state the next call
with the same weights finishes. Nothing here deletes: deleting a version would drop its alias with it. MLflow has no
compare-and-set for aliases, so callers hold a lock around reading the champion and moving the alias.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.storage import atomic_folder
from tasks.tracking.connection import TrackingSettings, connect, experiment_id, mlflow_errors

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"


@dataclass(frozen=True, slots=True)
class Version:
    """A registered model version; `weights` is the hash of its weight files, `tags` its lineage."""

    model: str
    version: int
    weights: str
    tags: dict[str, str]


class Registry:
    """The versions of one model. Every method raises ValueError with a remedy where MLflow cannot be reached."""

    def __init__(self, settings: TrackingSettings, model: str):
        self.settings, self.model = settings, model
        with mlflow_errors(settings):
            self.client = connect(settings)
            self.experiment_id = experiment_id(self.client, settings)

    def champion(self) -> Version | None:
        """The version the alias points at; None where there is no champion yet."""
        with mlflow_errors(self.settings):
            found = _or_none(lambda: self.client.get_model_version_by_alias(self.model, CHAMPION))
        return _version(found) if found else None

    def find_by_weights(self, weights: str) -> Version | None:
        """The version that already holds these weights, whether or not it is the champion."""
        with mlflow_errors(self.settings):
            found = self.client.search_model_versions(f"name = '{self.model}' and tag.weights_hash = '{weights}'")
        return min(map(_version, found), key=lambda version: version.version, default=None)

    def register(self, snapshot: Path, *, weights: str, tags: dict[str, str], run_id: str | None) -> Version:
        """A version of `snapshot`'s files; the one that exists if these weights were registered before."""
        existing = self.find_by_weights(weights)
        if existing:
            return existing
        with mlflow_errors(self.settings):
            source_run = self._parent_of(run_id)
            model = self._logged_model(snapshot, weights, source_run)
            if _or_none(lambda: self.client.get_registered_model(self.model)) is None:
                self.client.create_registered_model(self.model)
            all_tags = {**tags, "weights_hash": weights}
            created = self.client.create_model_version(
                self.model, model.model_uri, run_id=source_run, tags=all_tags, model_id=model.model_id
            )
        return _version(created)

    def make_champion(self, version: Version) -> None:
        """Move the alias; one row in MLflow, so readers see the old champion or the new one and nothing between."""
        with mlflow_errors(self.settings):
            self.client.set_registered_model_alias(self.model, CHAMPION, str(version.version))

    def download(self, version: Version, folder: Path) -> Path:
        """The version's files in `folder`, whole or not at all."""
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        try:
            with atomic_folder(folder) as temporary:
                source = Path(download_artifacts(f"models:/{self.model}/{version.version}", dst_path=str(temporary)))
                if not any(source.iterdir()):  # MLflow takes a missing folder for an empty one
                    raise FileNotFoundError("its folder is missing or empty")
                for item in () if source.samefile(temporary) else source.iterdir():
                    shutil.move(item, temporary / item.name)
        except (MlflowException, OSError) as error:
            raise ValueError(
                f"{self.model} version {version.version} is registered, but its files cannot be fetched "
                f"({' '.join(str(error).split())[:300]}), so nothing can be compared with it. Restore "
                f"{self.settings.artifact_location}, or move the alias {CHAMPION!r} to another version."
            ) from error
        return folder

    def _logged_model(self, snapshot: Path, weights: str, source_run: str | None) -> Any:
        """The snapshot's files in MLflow, READY. One that a killed call left half uploaded is uploaded again."""
        same = f"tags.weights_hash = '{weights}'"
        found = list(self.client.search_logged_models([self.experiment_id], same, max_results=1))
        model = found[0] if found else None
        if model is None:
            tags = {"weights_hash": weights}
            model = self.client.create_logged_model(self.experiment_id, self.model, source_run, tags=tags)
        if str(model.status) != "READY":
            self.client.log_model_artifacts(model.model_id, str(snapshot))
            model = self.client.finalize_logged_model(model.model_id, "READY")
        return model

    def _parent_of(self, run_id: str | None) -> str | None:
        """The flow's run, of which a stage's run is a child: that is what made the model."""
        if run_id is None:
            return None
        run = self.client.get_run(run_id)
        return str(run.data.tags.get("mlflow.parentRunId", run_id))


def _or_none(call: Callable[[], Any]) -> Any:
    """What `call` gives, or None where MLflow says there is no such thing. Any other fault is raised."""
    from mlflow.exceptions import MlflowException

    try:
        return call()
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _version(found: ModelVersion) -> Version:
    return Version(found.name, int(found.version), found.tags.get("weights_hash", ""), dict(found.tags))
