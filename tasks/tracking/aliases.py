"""Who is champion, and how one follows another so that a crash at any moment leaves nothing half done.

Three aliases: `champion` is in production, `previous` is where a rollback leads, `challenger` is registered and waits.
They follow the journal (`journal.py`, summed up by `reigns.py`): an entry decides, in one step, and the aliases are
then set to what the journal says. MLflow moves one at a time, so while they lag behind, the registered model has the
tag `promotion.transition`. The invariant:

    Without that tag, the aliases are as the journal says, unless somebody moved them by hand. With it, they may be
    behind, and whoever next takes the ticket sets them right before anything else.

Each step of it may be repeated. `previous` moves first and `champion` is one row, so whoever asks MLflow for
`models:/NAME@champion` meanwhile gets the old one or the new one, never neither. In MLflow's page a version shows the
last thing that happened to it as the tag `last_event`, which is for people and read by nothing. Left out: who deserves
to be champion (`promote/stage.py`), and what is told where somebody did move an alias (`discrepancies.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tasks.core.terminal import warn
from tasks.tracking.connection import TrackingSettings, mlflow_errors
from tasks.tracking.discrepancies import find_discrepancies
from tasks.tracking.journal import MAX_REASON, Entry, append_all, mend, new_entry, read_journal
from tasks.tracking.registry import Registry
from tasks.tracking.registry_lock import Ticket, only_promotion
from tasks.tracking.reigns import Reigns, summarise_journal
from tasks.tracking.versions import CHALLENGER, CHAMPION, PREVIOUS, VERIFYING_TAGS, Version

TRANSITION = "promotion.transition"
LAST_EVENT = "last_event"  # a tag of a version


def open_registry(settings: TrackingSettings, model: str) -> Registry:
    """The registry; what a killed promotion or rollback left half done has been carried out."""
    registry = Registry(settings, model)
    if TRANSITION in registry.model_tags():
        with promotion(registry):
            pass
    return registry


@contextmanager
def promotion(registry: Registry) -> Iterator[Ticket]:
    """Be the only one to move aliases, with nothing half done before. ValueError where there is no registered model:
    an empty one made here would take the name that a renamed one is to be given back.
    """
    with mlflow_errors(registry.settings):
        _refuse_no_model(registry)
        with only_promotion(registry.client, registry.model) as ticket:
            for fault in mend(registry, ticket):
                warn(f"warning: {registry.model}: {fault} in MLflow, by hand; it was put back from its copy.")
            if TRANSITION in registry.model_tags():
                align(registry, ticket)
            yield ticket


def _refuse_no_model(registry: Registry) -> None:
    if registry.all_aliases() is not None:
        return
    for discrepancy in find_discrepancies(registry, read_reigns(registry)):
        raise ValueError(discrepancy.sentence)
    raise ValueError(
        f"{registry.model}: there is no registered model of this name, so there is nothing to change. Correct "
        f"promote.model_name, or run `python -m tasks promote`, which makes it."
    )


def read_reigns(registry: Registry) -> Reigns:
    """The record."""
    return summarise_journal(read_journal(registry).entries)


def reigning(registry: Registry, *, quietly: bool = False) -> Version | None:
    """The champion by the record, None before the first. ValueError where the alias says otherwise, or the version was
    deleted: a first champion has lower hurdles. What else was moved by hand is told on the way.
    """
    reigns = read_reigns(registry)
    for discrepancy in find_discrepancies(registry, reigns):
        if discrepancy.alias == CHAMPION:
            raise ValueError(discrepancy.sentence)
        if not quietly:
            warn(f"warning: {discrepancy.sentence}")
    return registry.version(reigns.champion) if reigns.champion is not None else None


def refuse_another_champion(registry: Registry, expected: Version | None) -> None:
    """ValueError where the champion is no longer the one a decision was made against."""
    champion = reigning(registry, quietly=True)
    if (champion and champion.version) != (expected and expected.version):
        raise ValueError(
            f"{registry.model}: {_named(champion)} while this decision was made against {_against(expected)}, so it "
            f"says nothing about today's champion. Nothing was moved; run `python -m tasks promote` again."
        )


def why_held(registry: Registry) -> str | None:
    """A sentence where promotions are held until somebody releases them."""
    hold = read_reigns(registry).hold
    if hold is None:
        return None
    return (
        f"Promotions are held since {hold.at} by {hold.by}: {hold.body['reason']}. "
        f'Release them: python -m tasks registry release --reason "…".'
    )


def refuse_held(registry: Registry) -> None:
    """ValueError where promotions are held."""
    held = why_held(registry)
    if held:
        raise ValueError(f"{registry.model}: {held} Nothing was moved.")


def succeed(
    registry: Registry, ticket: Ticket, version: Version, event: Mapping[str, Any], *, after: Sequence[Entry] = ()
) -> None:
    """`version` becomes champion, the champion becomes `previous`; a champion stays what it is.

    `event` is the body of the journal's entry, with its kind (promotion or rollback) under `event`; `after` are entries
    that are written with it and before it, all or none.
    """
    champion = read_reigns(registry).champion
    if champion == version.version:
        return
    body = {**event, "champion": version.version, "instead_of": champion, **identity(version)}
    record(registry, ticket, [*after, _entry(body.pop("event"), body)])


def identity(version: Version) -> dict[str, Any]:
    """What the journal keeps of a version, so that tags edited by hand can be told and put back."""
    kept = {name: version.tags[name] for name in VERIFYING_TAGS if name in version.tags}
    return {"weights": version.weights, "kept": kept}


def record(registry: Registry, ticket: Ticket, entries: Sequence[Entry]) -> None:
    """Append entries, then set the aliases to what the journal says."""
    ticket.check()
    registry.client.set_registered_model_tag(registry.model, TRANSITION, "the aliases are being set")
    append_all(registry, ticket, entries)
    align(registry, ticket)


def align(registry: Registry, ticket: Ticket) -> None:
    """Set the aliases to what the journal says, as far as the versions are there; each step may be repeated."""
    reigns, numbers = read_reigns(registry), registry.numbers()
    if reigns.came:
        _note(registry, ticket, reigns.came, numbers)
    aims = {PREVIOUS: next(iter(reigns.way_back(numbers)), None)}  # in this order
    aims |= {CHAMPION: reigns.champion, CHALLENGER: reigns.challenger}
    found = registry.all_aliases() or {}
    for alias, number in aims.items():
        _point(registry, ticket, alias, found.get(alias), number if number in numbers else None)
    ticket.check()
    registry.client.delete_registered_model_tag(registry.model, TRANSITION)


def _point(registry: Registry, ticket: Ticket, alias: str, before: int | None, number: int | None) -> None:
    """Let an alias name a version, or none."""
    if number == before:
        return
    ticket.check()
    if number is None:
        registry.client.delete_registered_model_alias(registry.model, alias)
    else:
        registry.client.set_registered_model_alias(registry.model, alias, str(number))


def _note(registry: Registry, ticket: Ticket, entry: Entry, numbers: Sequence[int]) -> None:
    """What happened last, on the page of each version it happened to."""
    champion, before = entry.body.get("champion"), entry.body.get("instead_of")
    told = f"{entry.at} {entry.kind} by {entry.by}: version {champion}, instead of {before}: {entry.body.get('reason')}"
    for number in (champion, before):
        if number in numbers:
            ticket.check()
            registry.client.set_model_version_tag(registry.model, str(number), LAST_EVENT, told)


def _entry(kind: Any, body: Mapping[str, Any]) -> Entry:
    """Its reason cut to what a tag may hold."""
    return new_entry(kind, {**body, "reason": str(body.get("reason", ""))[:MAX_REASON]})


def history(registry: Registry, version: Version) -> list[dict[str, Any]]:
    """What happened to a version, the oldest first: kind, time, person and body of each entry that names it."""
    return [
        {"event": entry.kind, "at": entry.at, "by": entry.by, **_without_tags(entry.body)}
        for entry in read_journal(registry).entries
        if version.version in {entry.body.get(name) for name in ("champion", "instead_of", "version")}
        or version.version in entry.body.get("undone", [])
    ]


def _without_tags(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "kept"}


def why_rolled_back(registry: Registry, weights: str) -> str | None:
    """A sentence where these weights were champion and the last thing that happened to them is a rollback, whatever
    lay beside them: a newer tokenizer file mends no defect by itself, and where one did, a person says so.

    A flow on a schedule would otherwise promote them again the next night.
    """
    numbers, reigns = [version.version for version in registry.with_weights(weights)], read_reigns(registry)
    last = reigns.set_aside.get(weights)
    undone = [number for number in numbers if number in reigns.undone]
    if last is None and undone:  # from before weights were kept
        last = reigns.fate[undone[-1]]
    if last is None:
        return None
    name = f"Version {numbers[0]}" if numbers else "A version that was deleted"
    why = f": {last.body['reason']}" if last.body.get("reason") else ""
    return f"{name} holds the same weights, and {last.by} rolled it back at {last.at}{why}."


def why_first_again(registry: Registry) -> str | None:
    """A sentence where there is no champion since somebody took one away: the hurdles are those of a first one."""
    came = read_reigns(registry).came
    if came is None or came.body.get("champion") is not None:
        return None
    return (
        f"There is no champion since {came.at}, when {came.by} went on without version {came.body.get('instead_of')} "
        f"({came.body.get('reason')}), so this counts as a first promotion."
    )


def _named(champion: Version | None) -> str:
    return f"version {champion.version} is champion" if champion else "there is no champion"


def _against(expected: Version | None) -> str:
    return f"version {expected.version}" if expected else "no champion"
