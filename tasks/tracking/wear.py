"""How often a test set has decided already: an entry of the registered model's journal for each decision taken on it.

A set that has decided often enough is no longer fresh: whoever keeps what did well on it, and trains on, fits these
very problems in the end, and among many equal challengers one looks better by luck. The count is kept in the registry,
where promotions take effect: a new artifacts folder, or another machine, that promotes into the same model must not
start from 0, and what deletes the registry deletes the champion that the count protects. The same decision taken again
(same episodes, same rival, same policy) looks at nothing new and counts once. Left out: when many is too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.storage import json_hash
from tasks.tracking.journal import append, read_journal
from tasks.tracking.succession import promotion

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry

LENGTH = 32  # digits of a hash that tell one from another


@dataclass(frozen=True, slots=True)
class Wear:
    """The decisions taken on a test set, the oldest first, with this one; `is_new` where it was not taken before."""

    decisions: list[dict[str, Any]]
    is_new: bool


def record_decision(registry: Registry, *, test: str, looked_at: Any, note: Mapping[str, Any]) -> Wear:
    """Count a decision on the test set of hash `test`; equal `looked_at` are one decision. `note` is kept with it."""
    key = json_hash(looked_at)[:LENGTH]
    with promotion(registry) as ticket:
        before = {entry.id for entry in read_journal(registry).of("decision")}
        append(registry, ticket, "decision", {**note, "test": test[:LENGTH]}, id=f"{test[:LENGTH]}.{key}")
        decisions = [entry for entry in read_journal(registry).of("decision") if entry.body["test"] == test[:LENGTH]]
    return Wear([entry.body for entry in decisions], f"{test[:LENGTH]}.{key}" not in before)
