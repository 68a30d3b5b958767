"""The verb `rollback`: the champion before becomes champion again, within seconds; only aliases move.

Its files are looked at first (that they are there, in their sizes) and not fetched: minutes count here, and whoever
fetches the champion checks its hash. Left out: telling what serves the model, which follows `models:/NAME@champion`.
"""

from __future__ import annotations

from tasks.promote import PromoteOptions
from tasks.settings import Settings, load, read_params
from tasks.tracking.connection import TrackingSettings
from tasks.tracking.model_uri import what_there_is
from tasks.tracking.registry import FILES_TAG, PREVIOUS, Registry, Version
from tasks.tracking.succession import history, open_registry, promotion, succeed


class RollbackSettings(Settings):
    """The sections of params.yaml that say which model, and where."""

    promote: PromoteOptions
    tracking: TrackingSettings


def rollback(*, to: int | None, reason: str) -> str:
    """Make `previous`, or version `to`, champion; what is champion now, in a line."""
    settings = load(RollbackSettings, read_params())
    registry = open_registry(settings.tracking, settings.promote.model_name)
    if not registry.numbers():
        raise ValueError(f"There is nothing to roll back to: {what_there_is(registry)}")
    with promotion(registry) as ticket:
        before, target = registry.champion(), _target(registry, to)
        _refuse_what_cannot_reign(registry, before, target)
        succeed(registry, ticket, target, {"event": "rollback", "reason": reason})
    now = f"{target.name} is champion"
    return f"{now}; version {before.version}, which was, is {PREVIOUS} now." if before else f"{now}; there was none."


def _target(registry: Registry, to: int | None) -> Version:
    target = registry.at(PREVIOUS) if to is None else registry.version(to)
    if target is None:
        what = "no champion before this one" if to is None else f"no version {to}"
        raise ValueError(
            f"{registry.model}: there is {what}, so there is nothing to roll back to. {what_there_is(registry)} "
            f"--to VERSION names one that was champion."
        )
    return target


def _refuse_what_cannot_reign(registry: Registry, champion: Version | None, target: Version) -> None:
    if champion and champion.version == target.version:
        raise ValueError(f"{target.name} is champion already, so nothing was moved. {what_there_is(registry)}")
    if FILES_TAG in target.tags and not history(target):
        raise ValueError(
            f"{target.name} was never champion, so this would be no rollback but a promotion nobody decided. "
            f"Run `python -m tasks promote`."
        )
    problem = registry.missing_files(target)
    if problem:
        raise ValueError(
            f"{target.name} cannot become champion again: {problem}. Restore {registry.settings.artifact_location} "
            f"from a backup, or name another version with --to. {what_there_is(registry)}"
        )
