"""A model's files in MLflow's store: uploaded once, and compared with the hash of what was measured before they count.

What is registered is exactly what was hashed: the comparison is with what the store has, so neither an edit while the
upload ran nor a store that changed a byte goes unseen. What a killed call left half uploaded, or is gone, is uploaded
again. Left out: versions and their lineage (`registry.py`).
"""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.models.files import files_hash, only_the_model
from tasks.tracking.names import logged_model_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

FOLDER_TAG = "folder_hash"  # of every file of a model; versions from before have `files_hash`, of some


class Uploads:
    """Uploads of one registered model."""

    def __init__(self, client: MlflowClient, model: str):
        self.client, self.model = client, model
        self._verified: set[str] = set()  # logged models whose stored files were compared with their hash

    def upload(self, snapshot: Path, folder_hash: str, experiment_id: str, source_run: str | None) -> Any:
        """The logged model with the files of `snapshot`, READY. ValueError where the store has others.

        Half an upload is gone on with in its own folder alone: elsewhere its maker may still be at it.
        """
        same, here = f"tags.{FOLDER_TAG} = '{folder_hash}'", f"{socket.gethostname()}:{snapshot.absolute()}"
        found = list(self.client.search_logged_models([experiment_id], same))
        usable = [model for model in found if str(model.status) == "READY" or model.tags.get("folder") == here]
        model = max(usable, key=lambda item: str(item.status) == "READY", default=None)
        if model is None:
            tags = {FOLDER_TAG: folder_hash, "folder": here}
            model = self.client.create_logged_model(experiment_id, logged_model_name(self.model), source_run, tags=tags)
        if str(model.status) != "READY" or not self._holds(model, folder_hash):
            with only_the_model(snapshot) as folder:
                self.client.log_model_artifacts(model.model_id, str(folder))
            if not self._holds(model, folder_hash):
                raise self._other_files(model, snapshot, folder_hash)
        if str(model.status) != "READY":
            model = self.client.finalize_logged_model(model.model_id, "READY")
        return model

    def _holds(self, model: Any, folder_hash: str) -> bool:
        """Whether the store has exactly the files of this hash for a logged model. From a store that is no folder of
        this machine they are fetched for that, once per process.
        """
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        if model.model_id in self._verified:
            return True
        is_folder_here = Path(model.artifact_location.removeprefix("file://")).is_dir()
        try:
            with TemporaryDirectory() as folder:
                target = None if is_folder_here else folder
                there = Path(download_artifacts(artifact_uri=model.artifact_location, dst_path=target))
                is_the_same = files_hash(there) == folder_hash
        except (MlflowException, OSError):  # nothing there yet, or no longer
            return False
        if is_the_same:
            self._verified.add(model.model_id)
        return is_the_same

    def _other_files(self, model: Any, snapshot: Path, folder_hash: str) -> ValueError:
        """What to tell where the store has other files than were measured; half an upload of them is forgotten."""
        if str(model.status) != "READY":
            self.client.delete_logged_model(model.model_id)
        if files_hash(snapshot) != folder_hash:
            return ValueError(
                f"{snapshot}: its files changed since they were measured, so the success on record is not theirs. "
                f"Nothing was registered. Run `dvc repro evaluate`, then promote again."
            )
        return ValueError(
            f"{model.artifact_location}: holds other files than {snapshot}, also after they were uploaded again. "
            f"Nothing was registered. Remove that folder from the store, then run `python -m tasks promote` again."
        )
