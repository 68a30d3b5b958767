"""The command `prune`: free the room of results that nothing needs any more, after a list of them was shown.

Kept are the champion, the versions that a rollback leads to, the best, the newest, the anchor of decisions and whatever
an alias names; here and in DVC's cache also what the last runs made. A version that loses its weights keeps its
lineage.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.filesize import decimal
from rich.table import Table

from tasks.commands.dvc_remote import ask_dvc, dvc_remote
from tasks.commands.prune.dvc_cache import DvcCache, OldResults, find_old_results
from tasks.core.console import SafeConsole
from tasks.core.passing_faults import is_passing
from tasks.core.resume import resume_root
from tasks.core.settings import Paths, Settings, load, load_paths, read_params
from tasks.core.stages import STAGES
from tasks.core.terminal import tell, warn
from tasks.core.text import counted, first_few
from tasks.core.urls import parse_url
from tasks.core.workspace import as_shell_sees
from tasks.pipeline.run_lock import only_run
from tasks.pipeline.settings import PipelineSettings
from tasks.stages.promote.settings import PromoteSettings
from tasks.storage.inputs import at_endpoint
from tasks.storage.settings import PathsSettings, StorageSettings
from tasks.tracking.aliases import open_registry
from tasks.tracking.connection import mlflow_errors
from tasks.tracking.model_uri import refuse_edited_version
from tasks.tracking.pruning import find_unneeded, remove_unneeded
from tasks.tracking.registry import Registry
from tasks.tracking.settings import TrackingSettings
from tasks.tracking.stored_models import versions_of_experiment


class PruneSections(Settings):
    paths: PathsSettings
    pipeline: PipelineSettings
    promote: PromoteSettings
    storage: StorageSettings
    tracking: TrackingSettings


@dataclass(frozen=True, slots=True)
class Removal:
    """One row of the list; `size` in bytes, `files` those on this machine."""

    place: str
    what: str
    size: int
    remove: Callable[[], None]
    files: tuple[Path, ...] = ()


def prune(*, keep: int | None, yes: bool) -> bool:
    """Show what would go, also while a run is at work, and remove it with `yes`, alone. False where something would go
    and nothing did.
    """
    settings, paths = load(PruneSections, read_params()), load_paths(read_params())
    keep = settings.pipeline.retention.keep_runs if keep is None else keep
    with only_run(paths.artifacts) if yes else nullcontext():
        registry = open_registry(settings.tracking, settings.promote.model_name)
        found = list(_find(settings, paths, registry, keep))
        _print(found, keep)
        _tell_what_stays(paths)
        if not found:
            return True
        if not yes:
            tell("Nothing was removed. `python -m tasks prune --yes` removes these.")
            return False
        room = freed(found)
        refused = _remove(found)
    tell(f"freed {room} on this machine")
    if refused:
        raise ValueError(first_few(refused, 1, by=" "))
    return True


def _remove(found: Iterable[Removal]) -> list[str]:
    """Why some could not go: a server that refuses one keeps none of the others. One that does not answer ends it."""
    refused = []
    for removal in found:
        try:
            removal.remove()
        except ValueError as error:
            if is_passing(error):
                raise
            refused.append(str(error))
    return refused


def _find(settings: PruneSections, paths: Paths, registry: Registry, keep: int) -> Iterator[Removal]:
    """What is elsewhere comes first: where a server does not answer, nothing here was removed yet."""
    yield from _of_registry(registry, keep)
    cache = DvcCache(Path(ask_dvc("cache", "dir")))
    old = _find_old_results(cache, keep, registry)
    yield from _of_dvc_remote(settings, cache, old)
    yield from _of_mirror(settings, keep)
    yield from _of_dvc_cache(cache, old)
    yield from _of_checkpoints(paths)


def _find_old_results(cache: DvcCache, keep: int, registry: Registry) -> OldResults:
    """None in a cache that other projects may use: its notes are theirs too, and what they need is not known here. None
    either where a version's lineage is gone.
    """
    if not cache.folder.resolve().is_relative_to(Path().resolve()):
        tell(
            f"DVC's cache {cache.folder} is outside this folder, so other projects may need what is in it, and it "
            f"stays as it is. `dvc gc --all-commits --projects FOLDER …` removes what neither the commits of this "
            f"project nor those of FOLDER … name."
        )
        return OldResults([], set())
    try:
        locks = list(_lineage_locks(registry))
    except ValueError as error:
        warn(
            f"warning: {error} What that version needs of DVC's cache is unknown, so the cache stays. If nobody "
            f"needs it, delete it in MLflow."
        )
        return OldResults([], set())
    return find_old_results(cache, keep, locks)


def _of_registry(registry: Registry, keep: int) -> Iterator[Removal]:
    found = find_unneeded(registry, keep=keep)
    for item in found:
        what, size = f"weights of {registry.model} {item.name}", sum(item.files.values())
        yield Removal("MLflow", what, size, partial(remove_unneeded, registry, item.model_id, keep=keep), item.here())


def _of_dvc_remote(settings: PruneSections, cache: DvcCache, old: OldResults) -> Iterator[Removal]:
    """The weights of old runs alone: other workspaces may share the remote, and their data with this one."""
    address = dvc_remote()
    if address is None or not old.hashes:
        return
    from tasks.storage.client import connect
    from tasks.storage.pruning import objects_of_dvc, remove_objects

    hashes = cache.weights(old.hashes) & old.hashes
    url, endpoint = address
    store = connect(at_endpoint(settings.storage, endpoint))
    found = objects_of_dvc(store, parse_url(url), hashes)
    if found.keys:
        what = f"weights of older runs, {counted(len(found.keys), 'file')}"
        yield Removal(url, what, found.size, partial(remove_objects, store, found))


def _of_mirror(settings: PruneSections, keep: int) -> Iterator[Removal]:
    if settings.paths.remote is None:
        return
    from tasks.storage.client import connect
    from tasks.storage.pruning import old_checkpoints, old_results, remove_objects, remove_results

    store, remote = connect(settings.storage), parse_url(settings.paths.remote)
    days = settings.pipeline.retention.keep_checkpoints_days
    stopped = f"checkpoints of a training that stopped over {days:g} days ago"
    for what, each, remove in (
        ("older results", old_results(store, remote, keep=keep), remove_results),
        (stopped, old_checkpoints(store, remote, days=days), remove_objects),
    ):
        for found in each:
            yield Removal(str(found.url), what, found.size, partial(remove, store, found))


def _of_dvc_cache(cache: DvcCache, old: OldResults) -> Iterator[Removal]:
    files = cache.files(old.hashes)
    if files or old.notes:
        what = f"results of older runs, {counted(len(files), 'file')}"
        going = (*files, *(note.file for note in old.notes))
        yield Removal("DVC's cache", what, _total_size(files), partial(_unlink, going), going)


def _of_checkpoints(paths: Paths) -> Iterator[Removal]:
    """Of trainings that were stopped and then begun with other settings; the newest of a stage may go on."""
    for stage in STAGES:
        found = {folder: stat.st_mtime_ns for folder, stat in _stats(resume_root(stage, paths).glob("*"))}
        for folder in sorted(found, key=found.__getitem__)[:-1]:
            files = tuple(file for file in folder.rglob("*") if file.is_file())
            what = f"state of an unfinished {stage}"
            yield Removal(str(folder), what, _total_size(files), partial(shutil.rmtree, folder), files)


def _lineage_locks(registry: Registry) -> Iterator[str]:
    """Also of versions under another promote.model_name, which was trained here too."""
    registries = {registry.model: registry}
    with mlflow_errors(registry.settings):
        for version in versions_of_experiment(registry):
            if version.model not in registries:
                registries[version.model] = Registry(registry.settings, version.model)
            refuse_edited_version(registries[version.model], version)  # or what it needs would seem needless
            content = registries[version.model].read_lineage(version, "dvc.lock", Path.read_bytes)
            if content:
                yield content.decode()


def _print(found: list[Removal], keep: int) -> None:
    last = "the last run" if keep == 1 else f"the last {keep:,} runs"
    if not found:
        tell(f"Nothing to remove: all there is belongs to {last}, or is needed.")
        return
    table = Table(title=f"What nothing needs, beyond {last}", title_justify="left")
    for name in ("where", "what"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for removal in found:
        table.add_row(removal.place, removal.what, decimal(removal.size))
    SafeConsole().print(table)
    tell(f"On this machine that frees {freed(found)}; files with another link elsewhere free nothing.")


def _tell_what_stays(paths: Paths) -> None:
    """An ablation is of no run, and a person alone knows whether its results are still needed."""
    folder = paths.stage("ablation")
    if folder.exists():
        size = decimal(_total_size(file for file in folder.rglob("*") if file.is_file()))
        place = as_shell_sees(folder)
        tell(f"{place} ({size}) belongs to no run and is not looked at. Delete the folder if nobody needs it.")


def freed(found: Iterable[Removal]) -> str:
    """Bytes of this machine: of a file whose every link goes."""
    links: dict[tuple[int, int], set[Path]] = defaultdict(set)
    stats: dict[tuple[int, int], os.stat_result] = {}
    for file, stat in _stats(file for removal in found for file in removal.files):
        links[stat.st_dev, stat.st_ino].add(file)
        stats[stat.st_dev, stat.st_ino] = stat
    return decimal(sum(stats[key].st_size for key, files in links.items() if len(files) >= stats[key].st_nlink))


def _total_size(files: Iterable[Path]) -> int:
    return sum(stat.st_size for _, stat in _stats(files))


def _stats(files: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Of those that are still there: a run may be at work while the list is made."""
    for file in files:
        with suppress(FileNotFoundError):
            yield file, file.stat()


def _unlink(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
