"""Finds the versions that `models:/NAME@ALIAS` and `models:/NAME/VERSION` name. Only `tracking` of params.yaml is read,
so a model can be fetched on another machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tasks.core.files import atomic_file
from tasks.core.settings import load, read_params
from tasks.core.terminal import warn
from tasks.models.files import LINEAGE
from tasks.tracking.aliases import find_discrepancies, open_registry, read_settled, refuse_edited_tags
from tasks.tracking.history import read_history
from tasks.tracking.journal import LostJournal
from tasks.tracking.packed import unpack
from tasks.tracking.registry import Registry
from tasks.tracking.settings import REFUSED_IN_MODELS, TrackingSections, TrackingSettings
from tasks.tracking.versions import ALIASES, TRAJECTORIES_FILE, Version

MOST_LISTED = 10  # versions, in a message
URI = re.compile(
    rf"models:/(?P<model>[^{re.escape(REFUSED_IN_MODELS)}]+)(?:/(?P<number>[1-9][0-9]{{0,8}})|@(?P<alias>[\w-]+))"
)
SCHEME = "models:/"


def find_version(uri: str, address: str | None = None) -> tuple[Registry, Version]:
    """ValueError in one line where there is none. `address` is another MLflow than the one in params.yaml."""
    found = URI.fullmatch(uri)
    if not found:
        raise ValueError(
            f"{uri!r} does not name a model version, so nothing can be looked up. "
            f"Write models:/NAME@champion (or @previous, @challenger), or models:/NAME/3."
        )
    registry = open_registry(_tracking(address), found["model"])
    check_alias(registry, found["alias"])
    version = registry.at(found["alias"]) if found["alias"] else registry.version(int(found["number"]))
    if version is None:
        raise ValueError(f"{uri}: there is no such version. {what_there_is(registry)}")
    return registry, version


def _tracking(address: str | None) -> TrackingSettings:
    params = read_params()
    if address is None:
        return load(TrackingSections, params).tracking
    given = {**params, "tracking": {**params.get("tracking", {}), "uri": address}}
    tracking = load(TrackingSections, given, source=Path("--registry")).tracking
    if (file := tracking.database) and not file.exists():  # MLflow would make an empty one
        raise ValueError(f"--registry {address}: there is no {file.absolute()}, so nothing is registered. Correct it.")
    return tracking


def check_alias(registry: Registry, alias: str | None, *, quietly: bool = False) -> None:
    """ValueError where the requested alias is not as recorded: it would name another model than was decided. Other
    differences are warnings, or `quietly` nothing.
    """
    tell = (lambda text: None) if quietly else warn
    try:
        found = find_discrepancies(registry, *read_settled(registry))
    except ValueError as error:  # no journal to compare it with
        if alias in ALIASES:
            raise
        tell(f"warning: {error}")
        return
    for discrepancy in found:
        if discrepancy.alias == alias:
            raise ValueError(f"{discrepancy.sentence} A version itself is named models:/{registry.model}/NUMBER.")
        tell(f"warning: {discrepancy.sentence}")


def refuse_edited_version(registry: Registry, version: Version) -> None:
    """ValueError where what verifies its files is not as recorded: they may be anybody's."""
    try:
        history = read_history(registry)
    except LostJournal:  # `find_version` warned of it
        return
    refuse_edited_tags(history, version)


def what_there_is(registry: Registry) -> str:
    numbers = registry.numbers()
    if not numbers:
        return f"{registry.settings.uri} has no version of {registry.model}; `python -m tasks promote` makes one."
    aliases = [f"{alias} is {version.version}" for alias in ALIASES if (version := registry.at(alias))]
    newest = ", ".join(map(str, numbers[-MOST_LISTED:]))
    which = f"version {newest}" if len(numbers) <= MOST_LISTED else f"{len(numbers):,} versions, the newest {newest}"
    return f"{registry.model} has {which} ({'; '.join(aliases) or 'no alias'})."


@dataclass(frozen=True, slots=True)
class VersionEpisodes:
    version: Version
    trajectories: Path


def fetch_test_trajectories(uri: str, folder: Path) -> VersionEpisodes:
    """Unpack them to FOLDER/NAME-N.jsonl; ValueError where the version does not exist or has none."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # of one small file
    registry, version = find_version(uri)
    refuse_edited_version(registry, version)
    file = folder / f"{_safe(version.model)}-{version.version}.jsonl"
    with atomic_file(file) as target:
        if registry.read_lineage(version, TRAJECTORIES_FILE, lambda packed: unpack(packed, target)) is None:
            raise ValueError(
                f"{version.name} has no {LINEAGE}/{TRAJECTORIES_FILE}, so its episodes cannot be compared. "
                f"Name the evaluate folder of the run that made it instead."
            )
    return VersionEpisodes(version, file)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
