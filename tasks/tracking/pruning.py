"""Weights in MLflow's store that nothing needs any more. A version stays, with its lineage and all that was decided of
it; only its weight files go, and the journal says when and by whom. Registering the same model again brings them back.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.models.files import LINEAGE
from tasks.tracking.aliases import lock_registry, record
from tasks.tracking.connection import mlflow_errors, or_none
from tasks.tracking.history import ChampionHistory, anchors, summarise_journal
from tasks.tracking.journal import Journal, new_entry, read_journal
from tasks.tracking.model_files import store_folder, weight_files
from tasks.tracking.settings import logged_model_name
from tasks.tracking.stored_models import every_version, logged_models
from tasks.tracking.versions import CHALLENGER, CHAMPION, FOLDER_TAG, Version

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry

ABANDONED_AFTER_DAYS = 1.0  # an upload takes hours at most, and another machine's is never touched


class StoredWeights(NamedTuple):
    """Weight files of a logged model. `version` is the registered version that they are of, also of one that was
    deleted by hand; None where that is not known, or they are of an upload that never became one: `was_version` says
    which.
    """

    version: int | None
    was_version: bool
    is_deleted: bool
    model_id: str
    location: str
    files: dict[str, int]  # bytes by path
    folder: Path | None  # of a store on this machine

    @property
    def name(self) -> str:
        if not self.was_version:
            return f"an upload that became no version ({self.model_id})"
        known = f"version {self.version}" if self.version else f"a version ({self.model_id})"
        return f"{known}, which was deleted in MLflow" if self.is_deleted else known

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
    found = {number: reason for number, reason in reasons if number is not None}
    for number in sorted(set(numbers) & set(found), reverse=True):  # an anchor may be gone back to as well
        for anchor in _anchor_after_rollback(journal, history, number):
            found.setdefault(anchor, f"the anchor of decisions after a rollback to version {number}")
    return found


def _anchor_after_rollback(journal: Journal, history: ChampionHistory, target: int) -> list[int]:
    """The version that success may not fall below then; none where no rollback leads to the target."""
    closed = {*history.defects, *history.pruned, history.champion}
    if target in closed or not history.was_champion(target):
        return []
    body = {"champion": target, "instead_of": history.champion, "undone": history.gone_back_over(target)}
    return anchors([*journal.entries, new_entry("rollback", body)])[-1:]


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
            if item.was_version:
                versions = [] if item.version is None else [item.version]
                record(registry, lock, [new_entry("pruning", {"versions": versions, "files_of": item.model_id})])
            lock.check()
            _remove(registry, item)


def _unneeded(registry: Registry, journal: Journal, keep: int, *, only: str | None = None) -> Iterator[StoredWeights]:
    """What a version of another name has its files in stays: a renamed model's champion, or a copy."""
    versions = registry.versions()
    needed = needed_versions(registry, journal, versions, keep=keep)
    numbers = {version.model_id: version.version for version in versions}
    used = _places_of_needed(registry, needed)
    deleted = _deleted_versions(journal, versions)
    for model in _logged_models(registry, numbers):
        if {model.model_id, model.artifact_location} & used or only not in (None, model.model_id):
            continue
        is_there = model.model_id in numbers
        number = numbers[model.model_id] if is_there else deleted.get(model.tags.get(FOLDER_TAG))
        is_old = time.time() - model.last_updated_timestamp / 1000 > 86_400 * ABANDONED_AFTER_DAYS
        if number in needed or (number is None and not is_old):  # also a champion that was deleted by hand
            continue
        files = weight_files(registry.client, model)
        was_version = number is not None or _has_lineage(registry, model)
        if files or not was_version:
            place, folder = model.artifact_location, store_folder(model)
            yield StoredWeights(number, was_version, not is_there, model.model_id, place, files, folder)


def _places_of_needed(registry: Registry, needed: Collection[int]) -> set[str]:
    return {
        place
        for place, versions in every_version(registry).items()
        if any(version.model != registry.model or version.version in needed for version in versions)
    }


def _deleted_versions(journal: Journal, versions: Sequence[Version]) -> dict[str, int]:
    """The numbers of the versions that the journal names and MLflow does not have any more, by the hash of their files.
    Of those before the registered model was deleted, whose numbers came again, none is known.
    """
    there = {version.version for version in versions}
    kept = summarise_journal(journal.entries).kept
    return {tags[FOLDER_TAG]: number for number, tags in kept.items() if number not in there and FOLDER_TAG in tags}


def _has_lineage(registry: Registry, model: Any) -> bool:
    """Whether an upload became a version once: its lineage is stored just before."""
    return any(file.path == LINEAGE for file in registry.client.list_logged_model_artifacts(model.model_id))


def _logged_models(registry: Registry, own: Collection[str]) -> Iterator[Any]:
    """Those of this name, and of the versions that were registered before the model was renamed."""
    named = list(logged_models(registry, f"name = '{logged_model_name(registry.model)}'"))
    yield from named
    seen = {model.model_id for model in named}
    for model_id in sorted(set(own) - seen):
        renamed = or_none(partial(registry.client.get_logged_model, model_id))
        if renamed:
            yield renamed


def _remove(registry: Registry, item: StoredWeights) -> None:
    """MLflow's store removes them, be it a folder, a bucket or behind a server. ValueError where some are still there:
    S3 answers 200 with a refusal of each key, which MLflow does not read.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    store = get_artifact_repository(item.location)
    for path in item.files if item.was_version else [None]:
        store.delete_artifacts(path)
    if left := sorted(item.files.keys() & weight_files(registry.client, item)):
        raise ValueError(
            f"{item.location}: {len(left)} of its files, such as {left[0]}, could not be removed, so they still take "
            f"room. Get the right to delete there, then run `python -m tasks prune` again."
        )
    if not item.was_version:
        registry.client.delete_logged_model(item.model_id)


def _success(version: Version) -> float:
    try:
        return float(version.tags["test.success_rate"])
    except (KeyError, ValueError):  # registered by hand, or edited
        return -1.0
