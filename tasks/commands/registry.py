"""The command `registry`: a model's journal, and the remedies where MLflow differs from it.

`adopt` records the registry as it is, `restore` changes it back to the record; the journal says who ran them and why.
`release` ends what `rollback --hold` began.
"""

from __future__ import annotations

from collections.abc import Iterator

from tasks.commands.rollback import RollbackSections, refuse_unservable, require_reason
from tasks.core.settings import load, load_paths, read_params
from tasks.pipeline.run_lock import only_run
from tasks.tracking.aliases import (
    align,
    describe_edited,
    edited_tags,
    find_discrepancies,
    identity,
    lock_registry,
    open_registry,
    read_settled,
    record,
)
from tasks.tracking.connection import mlflow_errors
from tasks.tracking.history import ChampionHistory, read_history, summarise_journal
from tasks.tracking.journal import Entry, LostJournal, append, begin_again, new_entry, read_journal
from tasks.tracking.registry import Registry
from tasks.tracking.registry_lock import hold_lock
from tasks.tracking.relocate import relocate as correct_locations
from tasks.tracking.settings import TrackingSections
from tasks.tracking.versions import ALIASES, CHALLENGER, CHAMPION

NUM_SHOWN = 10


def show() -> Iterator[str]:
    registry = _registry()
    history, aliases = read_settled(registry)
    journal = read_journal(registry)
    recorded = dict(zip(ALIASES, _recorded_aliases(history, registry), strict=True))
    yield f"{registry.model}: " + "; ".join(
        f"{alias} is {f'version {number}' if number else 'none'}" for alias, number in recorded.items()
    )
    for discrepancy in find_discrepancies(registry, history, aliases):
        if not discrepancy.is_tag:
            yield f"differs: {discrepancy.sentence}"
    for item in registry.versions():
        if edited := edited_tags(history, item):
            yield f"differs: {describe_edited(item, edited)}"
    if history.hold:
        yield f"held: since {history.hold.at} by {history.hold.by}: {history.hold.body['reason']}"
    for version, entry in sorted(history.defects.items()):
        yield f"defect: version {version}, since {entry.at} by {entry.by}: {entry.body['reason']}"
    if len(journal.entries) > NUM_SHOWN:
        yield f"The last {NUM_SHOWN} of {len(journal.entries)} entries of the journal:"
    yield from map(_describe_entry, journal.entries[-NUM_SHOWN:])


def relocate() -> str:
    params = read_params()
    with only_run(load_paths(params).artifacts):
        return correct_locations(load(TrackingSections, params).tracking)


def restore() -> str:
    registry = _registry()
    with lock_registry(registry) as lock:
        history = read_history(registry)
        found = find_discrepancies(registry, history, registry.all_aliases())
        tags = [
            (version.version, name, value)
            for version in registry.versions()
            for name, value in edited_tags(history, version).items()
        ]
        for discrepancy in found:
            if discrepancy.is_deleted:
                raise ValueError(f"{discrepancy.fault}, so nothing can be put back. {discrepancy.remedy}")
        found = [discrepancy for discrepancy in found if not discrepancy.is_tag]  # `tags` has it
        if not found and not tags:
            return f"{registry.model} matches the record; nothing was changed."
        told = [*(discrepancy.fault for discrepancy in found), *(f"version {n}: tag {tag}" for n, tag, _ in tags)]
        for number, name, value in tags:
            lock.check()
            registry.client.set_model_version_tag(registry.model, str(number), name, value)
        record(registry, lock, [new_entry("restoration", {"restored": told})])
    return f"{registry.model} matches the record again. Put back: {'; '.join(told)}."


def adopt(*, reason: str) -> str:
    reason = require_reason(reason, "registry adopt")
    registry = _registry()
    with mlflow_errors(registry.settings):
        is_gone = registry.all_aliases() is None
        registry.make_model()
        with hold_lock(registry.client, registry.model) as lock:
            entries, lost = _read_entries(registry)
            history = summarise_journal(entries)
            if not (is_gone or lost or find_discrepancies(registry, history, registry.all_aliases())):
                raise ValueError(f"{registry.model} matches the record, so there is nothing to adopt.")
            body = {**_adoption_body(registry, history, anew=is_gone), "reason": reason}
            entry = new_entry("adoption", {**body, **({"lost_entries": lost.num_lost} if lost else {})})
            if is_gone or lost:
                begin_again(registry, lock, [*entries, entry])
                align(registry, lock)
            else:
                record(registry, lock, [entry])
    champion = entry.body["champion"]
    told = f"{registry.model}: recorded as it is, with {f'version {champion} as' if champion else 'no'} champion."
    return f"{told} {_describe_loss(lost)}" if lost else told


def release(*, reason: str) -> str:
    reason = require_reason(reason, "registry release")
    registry = _registry()
    with lock_registry(registry) as lock:
        hold = read_history(registry).hold
        if hold is None:
            raise ValueError(f"{registry.model}: promotions are not held, so there is nothing to release.")
        append(registry, lock, "release", {"reason": reason})
    return f"{registry.model}: promotions are possible again; {hold.by} had held them since {hold.at}."


def _registry() -> Registry:
    settings = load(RollbackSections, read_params())
    return open_registry(settings.tracking, settings.promote.model_name)


def _recorded_aliases(history: ChampionHistory, registry: Registry) -> tuple[int | None, int | None, int | None]:
    return history.champion, next(history.way_back(registry.exists), None), history.challenger


def _read_entries(registry: Registry) -> tuple[list[Entry], LostJournal | None]:
    """The entries of the journal, or those that can still be verified and what was lost."""
    try:
        return read_journal(registry).entries, None
    except LostJournal as lost:
        return lost.entries, lost


def _describe_loss(lost: LostJournal) -> str:
    if not lost.entries:
        return "The earlier journal could not be read: its holds, defects and decisions no longer count."
    told = f"The first {len(lost.entries)} entries of the earlier journal count on"
    later = f"the last {lost.num_lost} could" if lost.num_lost else "those that MLflow's database did not name could"
    return f"{told}; {later} not be verified, so a hold, a defect or a decision among them no longer counts."


def _adoption_body(registry: Registry, history: ChampionHistory, *, anew: bool) -> dict[str, object]:
    """ValueError where the champion is not the version it was registered as, cannot be served, or was rolled back for a
    defect. The body has no `previous`: where a rollback leads follows from the journal.
    """
    champion = registry.champion()
    if champion and not champion.weights and champion.version not in history.weights:
        raise ValueError(
            f"{champion.name}: has no tag weights_hash, so its files cannot be verified. Take the alias {CHAMPION} "
            f"from it in MLflow; `python -m tasks promote` registers a model with that tag."
        )
    if champion:
        refuse_unservable(
            registry,
            history,
            champion,
            otherwise=f"put the aliases back (python -m tasks registry restore), or take the alias {CHAMPION} "
            f"from it in MLflow",
        )
    defect = history.defects.get(champion.version) if champion else None
    if champion and defect:
        raise ValueError(
            f"{champion.name} was rolled back for a defect at {defect.at} by {defect.by} ({defect.body['reason']}), "
            f"so an alias set by hand cannot make it champion again. Put the aliases back: python -m tasks registry "
            f"restore; only promoting its "
            f'snapshot again makes it champion: python -m tasks promote --force --reason "…".'
        )
    same = [item for item in registry.versions() if history.weights.get(item.version) == item.weights]
    aliases = registry.all_aliases() or {}
    return {
        "champion": champion.version if champion else None,
        "challenger": aliases.get(CHALLENGER),
        "instead_of": history.champion,
        "anew": anew or (bool(history.weights) and not same),
        **(identity(champion) if champion else {}),
    }


def _describe_entry(entry: Entry) -> str:
    body = entry.body
    before = f"instead of {body['instead_of']}" if body.get("instead_of") else "with no champion before"
    named = [body["version"]] if "version" in body else body.get("versions", [])
    which = f" version {', '.join(map(str, named))}" if named else ""
    moved = f" version {body['champion']}, {before}" if "champion" in body else which
    why = body.get("reason") or body.get("policy_decision") or "; ".join(body.get("restored", []))
    return f"{entry.at} {entry.kind} by {entry.by}{moved}{f': {why}' if why else ''}"
