"""A model's files in MLflow's store: uploaded once, and compared with the hash of what was measured before they count.

What is registered is exactly what was hashed: the comparison is with what the store has, so neither an edit while the
upload ran nor a store that changed a byte goes unseen. What a killed call left half uploaded, or is gone, is uploaded
again. Left out: versions and their lineage (`registry.py`).
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.core.files import content_hash, read_json
from tasks.models.files import NOT_OF_THE_MODEL, files_hash, only_the_model
from tasks.tracking.settings import logged_model_name
from tasks.tracking.versions import EARLIER_FILE, FOLDER_TAG, LINEAGE, Version

if TYPE_CHECKING:
    from mlflow import MlflowClient


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


def refuse_altered_model(version: Version, folder: Path, *, store: str) -> None:
    """ValueError where the model in `folder` is not the registered one, file by file."""
    hashes: dict[str, tuple[str, Callable[[], str]]] = {"weights_hash": ("weights", lambda: _weights_hash(folder))}
    if FOLDER_TAG in version.tags:
        what = "files (its configuration, tokenizer or another was altered, added or lost)"
        hashes[FOLDER_TAG] = (what, lambda: files_hash(folder))
    else:
        hashes["files_hash"] = ("configuration and tokenizer", lambda: _hash_before(folder))
    for tag, (what, found) in hashes.items():
        if tag in version.tags and version.tags[tag] != found():
            raise ValueError(
                f"{version.name}: its stored {what} are not those that were registered, so it is not the model that "
                f"was measured. Restore {store} from a backup, or `python -m tasks rollback`."
            )


def remove_what_is_under_no_hash(folder: Path) -> None:
    """Of a downloaded folder: what lies beside the model and its lineage."""
    for name in NOT_OF_THE_MODEL:
        if name != LINEAGE:
            shutil.rmtree(folder / name, ignore_errors=True)


def refuse_altered_lineage(version: Version, folder: Path, *, store: str) -> None:
    """ValueError where the lineage in `folder` is not that of `version`, each earlier time included. What no tag names
    is removed from it: a killed call may have left some.
    """
    known: set[Path] = set()
    while True:
        for path, expected in version.lineage_files.items():
            if not (folder / path).is_file() or content_hash(folder / path) != expected:
                raise altered(version, path, store=store)
            known.add(folder / path)
        earlier = f"{version.lineage_folder}/{EARLIER_FILE}"
        if earlier not in version.lineage_files:
            break
        version = replace(version, tags=read_json(folder / earlier))
    for file in [file for file in (folder / LINEAGE).rglob("*") if file.is_file() and file not in known]:
        file.unlink()


def altered(version: Version, path: str, *, store: str) -> ValueError:
    return ValueError(
        f"{version.name}: its {path} is gone or not the one that was registered, so it proves nothing. "
        f"Restore {store} from a backup."
    )


def _weights_hash(folder: Path) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    return content_hash(*weights) if weights else "none"


def _hash_before(folder: Path) -> str:
    return content_hash(folder, ignore=lambda file: file.suffix == ".safetensors" or file.parent != folder)
