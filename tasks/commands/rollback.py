"""The command `rollback`: an earlier champion becomes champion again; its files are verified, and only aliases move.

It goes back along the journal as a browser does, never to a version that was itself rolled back: from c to b to a, and
not to c again. `--to c` takes that back, and the next rollback leads to a.
"""

from __future__ import annotations

from itertools import islice

from tasks.commands.prefect_events import tell_prefect
from tasks.core.settings import Settings, load, read_params
from tasks.stages.promote.settings import PromoteSettings
from tasks.tracking.aliases import (
    find_discrepancies,
    identity,
    lock_registry,
    open_registry,
    read_settled,
    record,
    refuse_edited_tags,
)
from tasks.tracking.history import ChampionHistory, read_history
from tasks.tracking.journal import MAX_REASON, new_entry
from tasks.tracking.model_uri import what_there_is
from tasks.tracking.registry import Registry
from tasks.tracking.settings import TrackingSettings
from tasks.tracking.versions import CHAMPION, PREVIOUS, Version
from tasks.tracking.waiting import ending_of_stale


class RollbackSections(Settings):
    promote: PromoteSettings
    tracking: TrackingSettings


def rollback(*, reason: str, to: int | None = None, back: int = 1, defect: bool = False, hold: bool = False) -> str:
    """Make version `to`, or the champion `back` champions ago, champion; returns the line to print.

    `defect`: what is rolled back never returns by a rollback. `hold`: nothing is promoted until `registry release`.
    """
    reason = require_reason(reason, "rollback")
    settings = load(RollbackSections, read_params())
    registry = open_registry(settings.tracking, settings.promote.model_name)
    target = _find_target(registry, to, back)
    registry.verify(target)  # may take long, and needs no lock
    with lock_registry(registry) as lock:
        if not _find_target(registry, to, back).has_files_of(target):
            raise ValueError(
                f"{registry.model}: while the files of version {target.version} were verified, another version "
                f"became champion. Nothing was changed; run `python -m tasks rollback` again."
            )
        history = read_history(registry)
        undone = history.gone_back_over(target.version, defect=defect)
        body = {"champion": target.version, "instead_of": history.champion, "undone": undone, "defect": defect}
        entries = [new_entry("rollback", {**body, "reason": reason, **identity(target)})]
        entries += ending_of_stale(registry, target)
        entries += [new_entry("hold", {"reason": reason})] if hold else []
        record(registry, lock, entries)
    told = _describe_rollback(target, history.champion, registry.at(PREVIOUS), undone=undone, hold=hold)
    if to is None and (pruned := history.pruned_before(target.version)):
        told += f" Version {', '.join(map(str, pruned))} was passed over: `python -m tasks prune` removed its weights."
    tell_prefect("rolled_back", registry.model, target.version, told)
    return told


def require_reason(reason: str, verb: str) -> str:
    """The reason in one line; ValueError for an empty one, or one that cannot be stored."""
    text = " ".join(reason.split())
    if not text or len(text) > MAX_REASON or not text.isprintable():
        raise ValueError(
            f"{verb} needs a reason of 1 to {MAX_REASON:,} printable characters, so that it can be explained later: "
            f'python -m tasks {verb} --reason "…".'
        )
    return text


def _find_target(registry: Registry, to: int | None, back: int) -> Version:
    (history, aliases), has_versions = read_settled(registry), registry.has_versions()
    if not has_versions and not history.before and history.champion is None:
        raise ValueError(f"There is nothing to roll back to: {what_there_is(registry)}")
    for discrepancy in find_discrepancies(registry, history, aliases):
        if discrepancy.alias == CHAMPION and not (discrepancy.is_deleted and has_versions):
            raise ValueError(discrepancy.sentence)
    number = _step_back(registry, history, back) if to is None else to
    version = registry.version(number)
    if version is None:
        raise ValueError(f"{registry.model}: there is no version {number}. {_past_champions(registry, history)}")
    _refuse_ineligible(registry, history, version)
    return version


def _step_back(registry: Registry, history: ChampionHistory, back: int) -> int:
    way = list(islice(history.way_back(registry.exists), back))
    skipped = history.pruned_before(way[back - 1]) if len(way) == back > 1 else []
    if skipped:
        raise ValueError(
            f"{registry.model}: version {', '.join(map(str, skipped))}, a champion on the way {back} champions back, "
            f"lost its weights to `python -m tasks prune`, so it is unclear which one is meant. Nothing was moved. "
            f'Name it: python -m tasks rollback --to {way[back - 1]} --reason "…". {what_there_is(registry)}'
        )
    if len(way) < back:
        asked = "there is no champion before this one" if not way else f"only {len(way)} champions are before this one"
        left = " Those that were rolled back themselves or deleted do not count." if history.undone else ""
        raise ValueError(
            f"{registry.model}: {asked}, so there is nothing to roll back to.{left} "
            f"{_past_champions(registry, history)}"
        )
    return way[back - 1]


def _past_champions(registry: Registry, history: ChampionHistory) -> str:
    """Those that --to may name, with the command; without one, the versions there are."""
    closed = {*history.defects, *history.pruned, history.champion}
    past = sorted(number for number in history.fate if number not in closed and registry.exists(number))
    if not past:
        return what_there_is(registry)
    named = f"version {', '.join(map(str, past))}"
    return f'Past champions: {named}. Name one: python -m tasks rollback --to {past[-1]} --reason "…".'


def _refuse_ineligible(registry: Registry, history: ChampionHistory, target: Version) -> None:
    if history.champion == target.version:
        raise ValueError(f"{target.name} is champion already, so nothing was moved. {what_there_is(registry)}")
    if not history.was_champion(target.version):
        raise ValueError(
            f"{target.name} was never champion, so this would be a promotion without a decision, not a rollback. "
            f"Run `python -m tasks promote`."
        )
    defect = history.defects.get(target.version)
    if defect:
        raise ValueError(
            f"{target.name} was rolled back for a defect at {defect.at} by {defect.by} ({defect.body['reason']}), so "
            f"no rollback brings it back. Name another version with --to; only promoting its snapshot again makes it "
            f'champion: python -m tasks promote --force --reason "…".'
        )
    refuse_unservable(registry, history, target, otherwise="name another version with --to")


def refuse_unservable(registry: Registry, history: ChampionHistory, target: Version, *, otherwise: str) -> None:
    """ValueError where a version's weights were pruned, its tags edited or its files lost; `otherwise` is another way
    on.
    """
    pruned = history.pruned.get(target.version)
    if pruned:
        raise ValueError(
            f"{target.name} lost its weights to `python -m tasks prune` at {pruned.at} by {pruned.by}, so it cannot be "
            f"served. Make it again (python -m tasks lineage models:/{target.model}/{target.version} --verify DIR), or "
            f"{otherwise}."
        )
    refuse_edited_tags(history, target)
    problem = registry.missing_files(target)
    if problem:
        raise ValueError(
            f"{target.name} cannot become champion: {problem}. Restore its files from a backup, or {otherwise}. "
            f"{what_there_is(registry)}"
        )


def _describe_rollback(
    target: Version, before: int | None, previous: Version | None, *, undone: list[int], hold: bool
) -> str:
    told = f"{target.name} is champion"
    is_back = "is rolled back" if undone else "is not marked as rolled back"
    told += f"; version {before} {is_back}" if before else "; there was none"
    told += f", and {PREVIOUS} is version {previous.version}" if previous else ", and no earlier champion is left"
    held = 'Promotions are held until python -m tasks registry release --reason "…".'
    return f"{told}. {held}" if hold else f"{told}."
