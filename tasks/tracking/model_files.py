"""A model's files in MLflow's store: uploaded once in MLflow's transformers flavour, and compared with their hashes.

A store that is a folder of the same file system gets links to weights that nobody may write, as DVC's cache and a
merged adapter have them: such a version takes no room of its own. Any other file is copied.

The stored files are compared, which finds an edit during the upload and a store that changed a byte. Every downloaded
file is under a hash: the model's under `folder_hash`, the lineage's under tags. The flavour (`MLmodel` and a copy of
the tokenizer) follows from the model and is compared with what it should be.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from tasks.core.files import content_hash, read_json
from tasks.models.files import INDEX, LINEAGE, NOT_OF_THE_MODEL, TRAINED_ON, files_hash, only_the_model
from tasks.tracking.connection import local_folder, or_none
from tasks.tracking.settings import logged_model_name
from tasks.tracking.versions import EARLIER_FILE, FOLDER_TAG, Version

if TYPE_CHECKING:
    from mlflow import MlflowClient

MLMODEL = "MLmodel"
OF_MLFLOW = (MLMODEL, "registered_model_meta")  # the second by `load_model`, into a local store too
MAY_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
TOKENIZER_FOLDER = "components/tokenizer"
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # of any tokenizer's files
FLAVOUR = {
    "flavors": {
        "transformers": {
            "task": "text-generation",
            "instance_type": "TextGenerationPipeline",
            "pipeline_model_type": "AutoModelForCausalLM",
            "model_binary": ".",
            "components": ["tokenizer"],
            "tokenizer_type": "AutoTokenizer",
        }
    }
}


class Uploads:
    def __init__(self, client: MlflowClient, model: str):
        self.client, self.model = client, model
        self._verified: set[str] = set()  # logged models whose stored files were compared with their hash

    def upload(
        self, snapshot: Path, folder_hash: str, experiment_id: str, source_run: str | None, *, registered: str | None
    ) -> Any:
        """The logged model with the files of `snapshot`, READY; `registered` is the id of the version's, where there is
        one. ValueError where the store has other files. Only the same folder continues a partial upload: elsewhere the
        process that began it may still be at work. Another registered model's is its own to prune.
        """
        here = f"{socket.gethostname()}:{snapshot.absolute()}"
        known = or_none(lambda: self.client.get_logged_model(registered)) if registered else None
        found = [known] if known else self._find(experiment_id, folder_hash)
        usable = [model for model in found if str(model.status) == "READY" or model.tags.get("folder") == here]
        model = max(usable, key=lambda item: str(item.status) == "READY", default=None)
        if model is None:
            tags = {FOLDER_TAG: folder_hash, "folder": here}
            model = self.client.create_logged_model(experiment_id, logged_model_name(self.model), source_run, tags=tags)
        if str(model.status) != "READY" or not self._has_stored(model, snapshot, folder_hash):
            self._verified.discard(model.model_id)
            self._store(model, snapshot)
            if not self._has_stored(model, snapshot, folder_hash):
                raise self._other_files(model, snapshot, folder_hash)
        if str(model.status) != "READY":
            model = self.client.finalize_logged_model(model.model_id, "READY")
        return model

    def _find(self, experiment_id: str, folder_hash: str) -> list[Any]:
        same = f"name = '{logged_model_name(self.model)}' AND tags.{FOLDER_TAG} = '{folder_hash}'"
        return list(self.client.search_logged_models([experiment_id], same))

    def _store(self, model: Any, snapshot: Path) -> None:
        with only_the_model(snapshot) as folder, TemporaryDirectory() as beside:
            write_flavour(folder, Path(beside))
            store = store_folder(model)
            if store:
                _remove_earlier(folder, store)
            linked = link_weights(folder, store)
            with _without(folder, linked) as rest:
                self.client.log_model_artifacts(model.model_id, str(rest))
            self.client.log_model_artifacts(model.model_id, beside)

    def _has_stored(self, model: Any, snapshot: Path, folder_hash: str) -> bool:
        """Whether the store has exactly the files of this hash. A remote store is downloaded for that, once per
        process; later only whether the weights are still there is asked, which another machine may have pruned.
        """
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException

        if model.model_id in self._verified:
            return {file.name for file in snapshot.glob("*.safetensors")} <= weight_files(self.client, model).keys()
        here = store_folder(model)
        try:
            with TemporaryDirectory() as folder:
                target = None if here and here.is_dir() else folder
                stored = Path(download_artifacts(artifact_uri=model.artifact_location, dst_path=target))
                is_the_same = files_hash(stored) == folder_hash and has_flavour(stored)
        except (MlflowException, OSError):  # nothing there yet, or no longer
            return False
        if is_the_same:
            self._verified.add(model.model_id)
        return is_the_same

    def _other_files(self, model: Any, snapshot: Path, folder_hash: str) -> ValueError:
        if str(model.status) != "READY":
            self.client.delete_logged_model(model.model_id)
        if files_hash(snapshot) != folder_hash:
            return ValueError(
                f"{snapshot}: its files changed since they were measured, so the success on record is not theirs. "
                f"Nothing was registered. Run `dvc repro evaluate`, then promote again."
            )
        return ValueError(
            f"{model.artifact_location}: contains other files than {snapshot}, also after a second upload. "
            f"Nothing was registered. Remove that folder from the store, then run `python -m tasks promote` again."
        )


def weight_files(client: MlflowClient, model: Any) -> dict[str, int]:
    """The weights of a logged model that are in the store: bytes by path."""
    found = client.list_logged_model_artifacts(model.model_id)
    return {file.path: file.file_size or 0 for file in found if file.path.endswith(".safetensors")}


def store_folder(model: Any) -> Path | None:
    """Where a logged model's files are, in a store that is a folder of this machine."""
    return local_folder(str(model.artifact_location))


def _remove_earlier(folder: Path, store: Path) -> None:
    """What a killed call left of the files in `folder`: copies of read-only files could not be written over."""
    for file in folder.rglob("*"):
        if file.is_file():
            (store / file.relative_to(folder)).unlink(missing_ok=True)


def link_weights(folder: Path, store: Path | None) -> set[str]:
    """The names of the weight files that `store` has as links now. Those that somebody may write are left out: an edit
    would change the version too. So is every one where the file system has no links.
    """
    linked: set[str] = set()
    if store is None:
        return linked
    for file in [file for file in sorted(folder.glob("*.safetensors")) if not file.stat().st_mode & MAY_WRITE]:
        with suppress(OSError):
            store.mkdir(parents=True, exist_ok=True)
            os.link(os.path.realpath(file), store / file.name)
            linked.add(file.name)
    return linked


@contextmanager
def _without(folder: Path, names: set[str]) -> Iterator[Path]:
    """The folder, or where there are `names` a copy of it that lacks them."""
    if not names:
        yield folder
        return
    with TemporaryDirectory() as temporary:
        rest = Path(temporary) / "rest"
        shutil.copytree(folder, rest, ignore=lambda place, _: names if Path(place) == folder else ())
        yield rest


def protect_weights(folder: Path) -> None:
    """Make the weights that only this folder has read-only, so that a store may have links to them."""
    for file in folder.glob("*.safetensors"):
        if file.stat().st_nlink == 1:
            file.chmod(file.stat().st_mode & ~MAY_WRITE)


def write_flavour(model: Path, folder: Path) -> None:
    """What makes `mlflow.transformers.load_model` load a model folder as it is; deterministic."""
    tokenizer = folder / TOKENIZER_FOLDER
    tokenizer.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix in TOKENIZER_SUFFIXES and file.is_file() and file.name not in (INDEX, TRAINED_ON):
            shutil.copyfile(file, tokenizer / file.name)
    (folder / MLMODEL).write_text(yaml.safe_dump(FLAVOUR), encoding="utf-8")


def has_flavour(model: Path) -> bool:
    """Whether a stored model has exactly the flavour that follows from its files."""
    with TemporaryDirectory() as folder:
        expected = Path(folder)
        write_flavour(model, expected)
        names = MLMODEL, TOKENIZER_FOLDER.partition("/")[0]
        return all((model / name).exists() for name in names) and all(
            content_hash(model / name) == content_hash(expected / name) for name in names
        )


def refuse_altered_model(version: Version, folder: Path, *, store: str) -> None:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and version.weights != "none":
        raise ValueError(
            f"{version.name}: its weights are gone, so it can be neither played nor served. Where `python -m tasks "
            f"registry show` says that they were pruned, make it again: python -m tasks lineage "
            f"models:/{version.model}/{version.version} --verify DIR; else restore {store} from a backup."
        )
    found = {
        "weights": (version.tags.get("weights_hash"), content_hash(*weights) if weights else "none"),
        "files (its configuration, tokenizer or another was altered, added or lost)": (
            version.tags.get(FOLDER_TAG),
            files_hash(folder),
        ),
        f"{MLMODEL} and its components": (True, has_flavour(folder)),
    }
    for what, (expected, stored) in found.items():
        if expected not in (None, stored):  # None: its tag was deleted by hand; the other hash still verifies
            raise ValueError(
                f"{version.name}: its stored {what} are not those that were registered, so it is not the model that "
                f"was measured. Restore {store} from a backup, or `python -m tasks rollback`; or its tags, where "
                f"`python -m tasks registry show` says that they differ: python -m tasks registry restore."
            )


def remove_what_is_under_no_hash(folder: Path) -> None:
    """Removes from a downloaded folder what is neither the model nor its lineage."""
    for name in NOT_OF_THE_MODEL:
        if (folder / name).is_file():
            (folder / name).unlink()
        elif name != LINEAGE:
            shutil.rmtree(folder / name, ignore_errors=True)


def refuse_altered_lineage(version: Version, folder: Path, *, store: str) -> None:
    """ValueError where a file of the lineage in `folder` is altered or missing. Files that no tag names (a killed call
    may leave some) are removed.
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
