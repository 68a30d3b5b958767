"""How often test problems were looked at, and the error that decisions spent, both read from the journal.

A problem whose results people see often is no fresh test, so every *look* is counted by problem: each evaluation
(`stages/evaluate/noted.py` notes them), and every further decision on the same episodes. Repeating one is none. The
registry keeps this, so that another folder or machine does not start from 0. Entries `decision` and `look` name a test
set by its hash; one `test_set` entry each lists its problems, four bytes of each id's SHA-256.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Any

from tasks.core.packed_hashes import pack_hashes, unpack_hashes
from tasks.tracking.aliases import lock_registry
from tasks.tracking.journal import Entry, append_all, new_entry, read_journal

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry

HASH_BYTES = 4  # per problem: of 10,000, two collide with a chance of 1%, and then share looks
TEST_DIGITS = 32  # of a test set's hash


@dataclass(frozen=True, slots=True)
class HoldoutSet:
    sha256: str
    problem_ids: Sequence[str]

    @property
    def name(self) -> str:
        return self.sha256[:TEST_DIGITS]

    def to_entry(self) -> Entry:
        body = {"test": self.name, "problems": pack_hashes(map(_hash_of, self.problem_ids))}
        return new_entry("test_set", body, id=f"test_set.{self.name}")


@dataclass(frozen=True, slots=True)
class Looks:
    """How often a test set's problems were looked at (most and median), and in which decisions."""

    most: int
    median: int
    decisions: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class HoldoutHistory:
    """Every decision and evaluation in the journal, the oldest first."""

    decisions: list[Entry] = field(default_factory=list)
    looks: list[Entry] = field(default_factory=list)
    problems: Mapping[str, frozenset[bytes]] = field(default_factory=dict)  # by test set

    @property
    def errors_spent(self) -> list[tuple[datetime, float]]:
        """When decisions spent error, and how much; those that spent none are left out."""
        spent = [(entry.at, float(entry.body.get("alpha", 0.0))) for entry in self.decisions]
        return [(datetime.fromisoformat(at), alpha) for at, alpha in spent if alpha]

    def decision(self, id: str) -> Entry | None:
        return next((entry for entry in self.decisions if entry.id == id), None)

    def repeated(self, question: str) -> Entry | None:
        """The latest decision whose id begins with this: the same question, perhaps with other episodes."""
        return next((entry for entry in reversed(self.decisions) if entry.id.startswith(f"{question}.")), None)

    def num_decisions_on(self, test: HoldoutSet, evaluation: str) -> int:
        return sum(_is_of(entry, test, evaluation) for entry in self.decisions)

    def seen(self) -> set[tuple[str, str | None]]:
        """Names of test sets, each with an evaluation on it."""
        return {(entry.body["test"], entry.body.get("evaluation")) for entry in (*self.decisions, *self.looks)}

    def has_seen(self, test: HoldoutSet, evaluation: str) -> bool:
        return (test.name, evaluation) in self.seen()

    def looks_at(self, test: HoldoutSet) -> Looks:
        ours = [_hash_of(id) for id in test.problem_ids]
        per_set, per_problem = self._looks_per_set(), Counter[bytes]()
        for name, problems in self.problems.items():
            for problem in problems:
                per_problem[problem] += per_set[name]
        counts = [per_problem[problem] for problem in ours]
        met = {name for name, problems in self.problems.items() if problems.intersection(ours)}
        on_them = [entry for entry in self.decisions if entry.body["test"] in met]
        return Looks(max(counts, default=0), int(median(counts)) if counts else 0, on_them)

    def _looks_per_set(self) -> Counter[str]:
        """An evaluation counts as one look, or as the number of decisions taken on it."""
        per_evaluation = Counter(
            (entry.body["test"], entry.body.get("evaluation", entry.id)) for entry in self.decisions
        )
        seen = {(entry.body["test"], entry.body["evaluation"]) for entry in self.looks}
        per_set = Counter[str]()
        for test, evaluation in seen | per_evaluation.keys():
            per_set[test] += max(1, per_evaluation[test, evaluation])
        return per_set


def read_holdout_history(registry: Registry) -> HoldoutHistory:
    return _past_of(read_journal(registry).entries)


def record_decision(
    registry: Registry, test: HoldoutSet, body: Mapping[str, Any], *, id: str, expected: HoldoutHistory
) -> HoldoutHistory | None:
    """Record a decision; returns the history with it. None, with nothing recorded, where the journal has another new
    decision since `expected`, which changes what this one may spend.
    """
    with lock_registry(registry) as lock:
        past = read_holdout_history(registry)
        if past.decision(id) is None:
            if len(past.decisions) != len(expected.decisions):
                return None
            append_all(registry, lock, [test.to_entry(), new_entry("decision", {"test": test.name, **body}, id=id)])
            past = read_holdout_history(registry)
    return past


def record_looks(registry: Registry, evaluations: Iterable[tuple[HoldoutSet, str]]) -> None:
    """Record which test problems were evaluated, each with the hash of the episodes, unless already recorded."""
    seen = read_holdout_history(registry).seen()
    unseen = [(test, evaluation) for test, evaluation in evaluations if (test.name, evaluation) not in seen]
    entries = [entry for test, evaluation in unseen for entry in (test.to_entry(), _look(test, evaluation))]
    if not entries:
        return
    with lock_registry(registry) as lock:
        append_all(registry, lock, list({entry.id: entry for entry in entries}.values()))


def _past_of(entries: Iterable[Entry]) -> HoldoutHistory:
    past, problems = HoldoutHistory(), {}
    for entry in entries:
        if entry.kind == "decision":
            past.decisions.append(entry)
        elif entry.kind == "look":
            past.looks.append(entry)
        elif entry.kind == "test_set":
            problems[entry.body["test"]] = unpack_hashes(entry.body["problems"], HASH_BYTES)
    return HoldoutHistory(past.decisions, past.looks, problems)


def _look(test: HoldoutSet, evaluation: str) -> Entry:
    return new_entry("look", {"test": test.name, "evaluation": evaluation}, id=f"look.{test.name}.{evaluation[:32]}")


def _is_of(entry: Entry, test: HoldoutSet, evaluation: str) -> bool:
    return entry.body.get("test") == test.name and entry.body.get("evaluation") == evaluation


def _hash_of(problem_id: str) -> bytes:
    return hashlib.sha256(problem_id.encode()).digest()[:HASH_BYTES]
