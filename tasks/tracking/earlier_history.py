"""What a registry from before there was a journal says of its past: tags, read once and folded into the journal.

A transition was a tag of the registered model and of both versions, a decision a tag of the registered model. A
champion from before even these was only an alias. Only a version that has no lineage files can be one of those: any
other that merely has the alias was given it by hand. A challenger's alias is believed: it moves nobody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasks.core.files import json_hash

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version

EVENT = "promotion."  # and the time; tags of a version
REIGN = "promotion.reign."  # and the time; the same, tags of the registered model
DECIDED = "decided_on_test."  # and the hash of the test set, and that of what was compared
NOBODY = "nobody knows"


def earlier_events(registry: Registry) -> list[dict[str, Any]]:
    """The entries of a journal that these tags amount to, the oldest first. A tag that is not JSON counts as none."""
    from tasks.tracking.versions import CHALLENGER, CHAMPION, FILES_TAG

    tags = registry.model_tags()
    found = [_decision(key, note) for key, note in _objects(tags, DECIDED)]
    events = [event for _, event in _objects(tags, REIGN)]
    for number in registry.numbers():
        version = registry.version(number)
        events += [event for _, event in _objects(version.tags, EVENT)] if version else []
    found += [_transition(event) for event in events if isinstance(event.get("champion"), int)]
    champion = registry.at(CHAMPION)
    if champion and FILES_TAG not in champion.tags and not events:
        event = {"champion": champion.version, "instead_of": None, "reason": "", "weights": champion.weights}
        found.append(_transition({**event, "at": _made(registry, champion)}))
    challenger = registry.at(CHALLENGER)
    if challenger:
        waits = {"version": challenger.version, "reason": "", "weights": challenger.weights}
        found.append(
            {"id": "waiting", "kind": "waiting", "at": _made(registry, challenger), "by": NOBODY, "body": waits}
        )
    once = {entry["id"]: entry for entry in found}
    return sorted(once.values(), key=lambda entry: str(entry["at"]))


def _made(registry: Registry, version: Version) -> str:
    """When a version was registered."""
    made = registry.client.get_model_version(registry.model, str(version.version)).creation_timestamp
    return datetime.fromtimestamp(made / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _transition(event: Mapping[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in event.items() if name not in ("event", "at", "by")}
    kind = "rollback" if event.get("event") == "rollback" else "promotion"
    at, by = str(event.get("at", "")), str(event.get("by", NOBODY))
    return {"id": json_hash([kind, at, body])[:32], "kind": kind, "at": at, "by": by, "body": body}


def _decision(key: str, note: Mapping[str, Any]) -> dict[str, Any]:
    test, _, looked_at = key.removeprefix(DECIDED).partition(".")
    at = str(note.get("decided_at", ""))
    return {"id": f"{test}.{looked_at}", "kind": "decision", "at": at, "by": NOBODY, "body": {**note, "test": test}}


def _objects(tags: Mapping[str, str], prefix: str) -> list[tuple[str, dict[str, Any]]]:
    """The tags of this prefix that hold a JSON object."""
    found = []
    for key, text in tags.items():
        if key.startswith(prefix):
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append((key, value))
    return found
