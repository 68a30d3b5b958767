"""Who is champion, and how one follows another so that a crash at any moment leaves nothing half done.

Three aliases: `champion` is in production, `previous` was so before it, `challenger` is registered and not champion
yet. MLflow moves one at a time, so a move of several is first written down whole, as the tag `promotion.transition` of
the registered model. The invariant:

    Without that tag, the aliases are as the last transition meant them. With it, that transition is decided, and
    whoever next takes the ticket carries it out to the end before anything else.

Each step of it may be repeated. `previous` moves first and `champion` is one row, so whoever asks MLflow for
`models:/NAME@champion` meanwhile gets the old one or the new one, never neither. Where the version that was to become
champion has been deleted since, the aliases go back to what they were. Every transition is kept as a tag of both
versions: who, when, why; and as one of the model, since a version that is deleted takes its tags along. Left out: who
deserves it (`promote.py`).
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tasks.orders import MAX_REASON
from tasks.tracking.connection import TrackingSettings, mlflow_errors
from tasks.tracking.registry import CHALLENGER, CHAMPION, PREVIOUS, Registry, Version
from tasks.tracking.ticket import Ticket, only_promotion

TRANSITION = "promotion.transition"
EVENT = "promotion."  # and the time; tags of a version
REIGN = "promotion.reign."  # and the time; the same, tags of the registered model


class Transition(NamedTuple):
    """From which champion and previous to which, and the event that both versions keep."""

    champion: int
    previous: int | None
    champion_before: int | None
    previous_before: int | None
    event: dict[str, Any]


def open_registry(settings: TrackingSettings, model: str) -> Registry:
    """The registry; what a killed promotion or rollback left half done has been carried out."""
    registry = Registry(settings, model)
    if TRANSITION in registry.model_tags():
        with promotion(registry):
            pass
    return registry


@contextmanager
def promotion(registry: Registry) -> Iterator[Ticket]:
    """Be the only one to move aliases, with nothing half done before."""
    with mlflow_errors(registry.settings):
        registry.make_model()
        with only_promotion(registry.client, registry.model) as ticket:
            unfinished = registry.model_tags().get(TRANSITION)
            if unfinished:
                _carry_out(registry, ticket, Transition(**json.loads(unfinished)))
            yield ticket


def reigning(registry: Registry) -> Version | None:
    """The champion, None before the first. ValueError where it was deleted and there is one to go back to: a first
    champion has lower hurdles.
    """
    champion, previous = registry.champion(), registry.at(PREVIOUS)
    if champion is None and previous is not None:
        raise ValueError(
            f"{registry.model}: has no champion, though version {previous.version} was one before: the champion was "
            f"deleted, and nobody can say whether a challenger is better. Run `python -m tasks rollback` to make "
            f"version {previous.version} champion again."
        )
    return champion


def deleted_champion(registry: Registry) -> dict[str, Any] | None:
    """The event that made the last champion, where its version was deleted since."""
    events = [json.loads(text) for key, text in registry.model_tags().items() if key.startswith(REIGN)]
    last = max(events, key=lambda event: str(event["at"]), default=None)
    return None if last is None or registry.version(last["champion"]) else last


def refuse_another_champion(registry: Registry, expected: Version | None) -> None:
    """ValueError where the champion is no longer the one a decision was made against."""
    champion = registry.champion()
    if (champion and champion.version) != (expected and expected.version):
        raise ValueError(
            f"{registry.model}: {_named(champion)} while this decision was made against {_against(expected)}, so it "
            f"says nothing about today's champion. Nothing was moved; run `python -m tasks promote` again."
        )


def succeed(registry: Registry, ticket: Ticket, version: Version, event: Mapping[str, Any]) -> None:
    """`version` becomes champion, the champion becomes `previous`; a champion stays what it is."""
    champion, previous = registry.champion(), registry.at(PREVIOUS)
    if champion and champion.version == version.version:
        return
    deleted = None if champion else deleted_champion(registry)
    transition = Transition(
        champion=version.version,
        previous=champion.version if champion else None,
        champion_before=champion.version if champion else None,
        previous_before=previous.version if previous else None,
        event={
            **_signed(event),
            "champion": version.version,
            "instead_of": champion.version if champion else None,
            **({"after_deleted": deleted["champion"]} if deleted else {}),
        },
    )
    ticket.check()
    registry.client.set_registered_model_tag(registry.model, TRANSITION, json.dumps(transition._asdict()))
    _carry_out(registry, ticket, transition)


def _carry_out(registry: Registry, ticket: Ticket, transition: Transition) -> None:
    """Every step of a transition, from the first, whichever were done before."""
    exists = registry.version(transition.champion) is not None
    champion = transition.champion if exists else transition.champion_before
    previous = transition.previous if exists else transition.previous_before
    if exists:
        _keep_event(registry, ticket, transition)
    _point(registry, ticket, PREVIOUS, previous)
    _point(registry, ticket, CHAMPION, champion)
    challenger = registry.at(CHALLENGER)
    if challenger and challenger.version == champion:
        _point(registry, ticket, CHALLENGER, None)
    ticket.check()
    registry.client.delete_registered_model_tag(registry.model, TRANSITION)


def _keep_event(registry: Registry, ticket: Ticket, transition: Transition) -> None:
    when, event = str(transition.event["at"]).replace(":", "."), json.dumps(transition.event)
    ticket.check()
    registry.client.set_registered_model_tag(registry.model, f"{REIGN}{when}", event)
    for number in (transition.champion, transition.previous):
        if number is not None and registry.version(number):
            ticket.check()
            registry.client.set_model_version_tag(registry.model, str(number), f"{EVENT}{when}", event)


def _point(registry: Registry, ticket: Ticket, alias: str, number: int | None) -> None:
    """Let an alias name a version, or none where there is no such version any more."""
    ticket.check()
    if number is not None and registry.version(number):
        registry.client.set_registered_model_alias(registry.model, alias, str(number))
    else:
        registry.client.delete_registered_model_alias(registry.model, alias)


def history(version: Version) -> list[dict[str, Any]]:
    """The transitions a version took part in, oldest first; none of one from before they were kept."""
    events = [json.loads(text) for key, text in version.tags.items() if key.startswith(EVENT)]
    return sorted(events, key=lambda event: str(event["at"]))


def why_rolled_back(registry: Registry, weights: str) -> str | None:
    """A sentence where these weights were champion and the last thing that happened to them is a rollback, whatever
    lay beside them: a newer tokenizer file mends no defect by itself, and where one did, a person says so.

    A flow on a schedule would otherwise promote them again the next night.
    """
    for version in reversed(registry.with_weights(weights)):
        last = (history(version) or [{}])[-1]
        if last.get("event") == "rollback" and last["instead_of"] == version.version:
            why = f": {last['reason']}" if last["reason"] else ""
            told = f"Version {version.version} holds the same weights, and {last['by']} rolled it back"
            return f"{told} at {last['at']}{why}."
    return None


def _signed(event: Mapping[str, Any]) -> dict[str, Any]:
    """The event with who and when, its reason cut to what a tag may hold."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {**event, "reason": str(event.get("reason", ""))[:MAX_REASON], "at": now, "by": operator()}


def operator() -> str:
    """Who runs this, as the machine knows."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container without such a user
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def _named(champion: Version | None) -> str:
    return f"version {champion.version} is champion" if champion else "there is no champion"


def _against(expected: Version | None) -> str:
    return f"version {expected.version}" if expected else "no champion"
