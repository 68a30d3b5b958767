"""`models:/NAME@ALIAS` and `models:/NAME/VERSION`: MLflow's names of versions, looked up where params.yaml says.

Only the section `tracking` is read, and of it not the address where one is given: whoever fetches a model on another
machine needs no more than that.
"""

from __future__ import annotations

import re
from pathlib import Path

from tasks.core.settings import Settings, load, read_params
from tasks.core.terminal import warn
from tasks.tracking.aliases import open_registry, read_history
from tasks.tracking.connection import SQLITE, TrackingSettings
from tasks.tracking.discrepancies import find_discrepancies
from tasks.tracking.names import REFUSED_IN_MODELS
from tasks.tracking.registry import Registry
from tasks.tracking.versions import ALIASES, Version

URI = re.compile(
    rf"models:/(?P<model>[^{re.escape(REFUSED_IN_MODELS)}]+)(?:/(?P<number>[1-9][0-9]{{0,8}})|@(?P<alias>[\w-]+))"
)


class TrackingSections(Settings):
    """The section of params.yaml that says where MLflow is."""

    tracking: TrackingSettings


def find_version(uri: str, address: str | None = None) -> tuple[Registry, Version]:
    """The registry and the version a URI names; ValueError in one line where there is none.

    `address` is of an MLflow other than params.yaml names, as in a clone whose params.yaml is of another time.
    """
    found = URI.fullmatch(uri)
    if not found:
        raise ValueError(
            f"{uri!r} does not name a model version, so nothing can be looked up. "
            f"Write models:/NAME@champion (or @previous, @challenger), or models:/NAME/3."
        )
    registry = open_registry(_tracking(address), found["model"])
    _tell_discrepancies(registry, found["alias"])
    version = registry.at(found["alias"]) if found["alias"] else registry.version(int(found["number"]))
    if version is None:
        raise ValueError(f"{uri}: there is no such version. {what_there_is(registry)}")
    return registry, version


def _tracking(address: str | None) -> TrackingSettings:
    params = read_params()
    if address is None:
        return load(TrackingSections, params).tracking
    file = Path(address.removeprefix(SQLITE))
    if address.startswith(SQLITE) and not file.exists():  # MLflow would make an empty one
        raise ValueError(f"--registry {address}: there is no {file.absolute()}, so nothing is registered. Correct it.")
    given = {**params, "tracking": {**params.get("tracking", {}), "uri": address}}
    return load(TrackingSections, given, source=Path("--registry")).tracking


def _tell_discrepancies(registry: Registry, alias: str | None) -> None:
    """ValueError where an alias that is asked for is not as recorded: it would name another model than was decided."""
    try:
        found = find_discrepancies(registry, read_history(registry))
    except ValueError as error:  # no journal to hold it against
        if alias in ALIASES:
            raise
        warn(f"warning: {error}")
        return
    for discrepancy in found:
        if discrepancy.alias == alias:
            raise ValueError(f"{discrepancy.sentence} A version itself is named models:/{registry.model}/NUMBER.")
        warn(f"warning: {discrepancy.sentence}")


def what_there_is(registry: Registry) -> str:
    """The versions and aliases of a model, for a message."""
    numbers = registry.numbers()
    if not numbers:
        return f"{registry.settings.uri} holds no version of {registry.model}; `python -m tasks promote` makes one."
    aliases = [f"{alias} is {version.version}" for alias in ALIASES if (version := registry.at(alias))]
    return f"{registry.model} has version {', '.join(map(str, numbers))} ({'; '.join(aliases) or 'no alias'})."
