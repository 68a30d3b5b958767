"""Weights in MLflow's store that nothing needs any more. A version stays, with its lineage and all that was decided of
it; only its weight files go, and the journal says when and by whom. Registering the same model again brings them back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.tracking.aliases import lock_registry, record
from tasks.tracking.connection import mlflow_errors
from tasks.tracking.history import anchors, summarise_journal
from tasks.tracking.journal import Journal, new_entry, read_journal
from tasks.tracking.model_files import store_folder
from tasks.tracking.settings import logged_model_name
from tasks.tracking.versions import CHALLENGER, CHAMPION, Version

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry

ABANDONED_AFTER_DAYS = 1.0  # an upload takes hours at most, and another machine's is never touched


class StoredWeights(NamedTuple):
    """Weight files of a logged model: of a registered version, or of an upload that never became one (None)."""

    version: int | None
    model_id: str
    location: str
    files: dict[str, int]  # bytes by path
    folder: Path | None  # of a store on this machine

    @property
    def name(self) -> str:
        return f"version {self.version}" if self.version else f"an upload that became no version ({self.model_id})"

    def here(self) -> tuple[Path, ...]:
        """Its files on this machine, which may be links to what stays elsewhere."""
        return tuple(self.folder / path for path in self.files) if self.folder else ()


def needed_versions(registry: Registry, journal: Journal, versions: Sequence[Version], *, keep: int) -> dict[int, str]:
    """Of all `versions`, why each that an alias, a rollback or the next decision needs must keep its weights; `keep`:
    how many of the newest, and of the champions that a rollback leads to.
    """
    history, numbers = summarise_journal(journal.entries), [version.version for version in versions]
    best = max(versions, key=lambda version: (_success(version), version.version), default=None)
    reasons: list[tuple[int | None, str]] = [(number, "one of the newest") for number in numbers[-keep:]]
    way_back = islice(history.way_back(set(numbers).__contains__), keep)
    reasons += [(number, "a rollback leads to it") for number in way_back]
    reasons += [(best.version if best else None, "the best on test")]
    reasons += [(number, "the anchor of decisions") for number in anchors(journal.entries)[-1:]]
    reasons += [(number, f"alias {alias}") for alias, number in (registry.all_aliases() or {}).items()]
    reasons += [(history.champion, f"{CHAMPION} by the journal"), (history.challenger, f"{CHALLENGER} that waits")]
    return {number: reason for number, reason in reasons if number is not None}


def find_unneeded(registry: Registry, *, keep: int) -> list[StoredWeights]:
    """What `remove_unneeded` would remove."""
    with mlflow_errors(registry.settings):
        return list(_unneeded(registry, read_journal(registry), keep))


def remove_unneeded(registry: Registry, model_id: str, *, keep: int) -> None:
    """Remove a logged model's weights under the registry's lock, after the journal has it. Whether something needs them
    is asked again here: an alias may have moved since a person saw the list.
    """
    with lock_registry(registry) as lock, mlflow_errors(registry.settings):
        for item in _unneeded(registry, read_journal(registry), keep, only=model_id):
            if item.version is not None:
                record(registry, lock, [new_entry("pruning", {"versions": [item.version]})])
            lock.check()
            _remove(registry, item)


def _unneeded(registry: Registry, journal: Journal, keep: int, *, only: str | None = None) -> Iterator[StoredWeights]:
    versions = registry.versions()
    needed = needed_versions(registry, journal, versions, keep=keep)
    numbers = {version.model_id: version.version for version in versions}
    for model in _logged_models(registry):
        if only not in (None, model.model_id):
            continue
        number = numbers.get(model.model_id)
        is_old = time.time() - model.last_updated_timestamp / 1000 > 86_400 * ABANDONED_AFTER_DAYS
        if number in needed or (number is None and not is_old):
            continue
        files = _weight_files(registry, model.model_id)
        if files or number is None:
            yield StoredWeights(number, model.model_id, model.artifact_location, files, store_folder(model))


def _logged_models(registry: Registry) -> Iterator[Any]:
    where, token = f"name = '{logged_model_name(registry.model)}'", None
    while True:
        page = registry.client.search_logged_models([registry.experiment_id], where, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _weight_files(registry: Registry, model_id: str) -> dict[str, int]:
    found = registry.client.list_logged_model_artifacts(model_id)
    return {file.path: file.file_size or 0 for file in found if file.path.endswith(".safetensors")}


def _remove(registry: Registry, item: StoredWeights) -> None:
    """MLflow's store removes them, be it a folder, a bucket or behind a server."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store = get_artifact_repository(item.location)
    if item.version is None:
        store.delete_artifacts()
        registry.client.delete_logged_model(item.model_id)
    else:
        for path in item.files:
            store.delete_artifacts(path)


def _success(version: Version) -> float:
    try:
        return float(version.tags["test.success_rate"])
    except (KeyError, ValueError):  # registered by hand, or edited
        return -1.0
