"""The challenger that waits for a person: at most one, an entry of the journal, under the alias `challenger`.

The decision is among the version's files (lineage/decision.json), so any machine that reaches the registry can approve
it. An approval or a withdrawal ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasks.tracking.aliases import current_champion, identity, lock_registry, record
from tasks.tracking.connection import mlflow_errors
from tasks.tracking.journal import Entry, Journal, new_entry, read_journal
from tasks.tracking.versions import FOLDER_TAG

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry
    from tasks.tracking.registry_lock import RegistryLock
    from tasks.tracking.versions import Version

HOW = 'python -m tasks promote --approve --reason "…" (or --withdraw); where a flow waits, also python -m flows approve'


@dataclass(frozen=True, slots=True)
class Waiting:
    """`against` is the champion it was decided against, {version, weights} or None; `decided_at` identifies it."""

    version: int
    weights: str
    snapshot: str
    decided_at: str
    expires: datetime
    against: Mapping[str, Any] | None
    kept: Mapping[str, str]

    @property
    def files(self) -> str:
        return self.kept.get(FOLDER_TAG, self.weights)

    @property
    def until(self) -> str:
        return f"{self.expires:%Y-%m-%d %H:%M} UTC"

    @property
    def sentence(self) -> str:
        return f"Version {self.version} ({self.snapshot}) still waits for approval, until {self.until}: {HOW}"

    def is_expired(self) -> bool:
        return datetime.now(UTC) >= self.expires

    def is_against(self, champion: Version | None) -> bool:
        now = champion and {"version": champion.version, "weights": champion.weights}
        return self.against == now


def find_waiting(registry: Registry) -> Waiting | None:
    return waiting_in(read_journal(registry).entries)


def waiting_in(entries: Iterable[Entry]) -> Waiting | None:
    found: Waiting | None = None
    for entry in entries:
        if entry.kind == "waiting":
            body = {name: entry.body[name] for name in Waiting.__dataclass_fields__}
            found = Waiting(**{**body, "expires": datetime.fromisoformat(body["expires"])})
        elif found and (_ends(entry, found) or entry.body.get("anew")):
            found = None
    return found


def _ends(entry: Entry, waiting: Waiting) -> bool:
    if entry.kind == "adoption":
        return entry.body.get("challenger") != waiting.version
    is_over = entry.kind in ("approval", "withdrawal") and entry.body.get("version") == waiting.version
    return is_over or (entry.kind == "promotion" and entry.body.get("champion") == waiting.version)


def still_waits(registry: Registry, waiting: Waiting, files: str) -> bool:
    """Whether the decision is about the model of this hash and its version exists. Anybody may remove the alias, so it
    does not count.
    """
    return waiting.files == files and registry.version(waiting.version) is not None


def last_waiting_entry(registry: Registry) -> Entry | None:
    entries = read_journal(registry).of("waiting", "approval", "withdrawal")
    return entries[-1] if entries else None


def approval_of(registry: Registry, version: Version, decided_at: str) -> Entry | None:
    approvals = read_journal(registry).of("approval")
    names = {"version": version.version, "decided_at": decided_at}
    return next((entry for entry in reversed(approvals) if names.items() <= entry.body.items()), None)


def record_waiting(
    registry: Registry, lock: RegistryLock, version: Version, *, decision: Mapping[str, Any], against: Version | None
) -> None:
    before = find_waiting(registry)
    entries = [withdrawal(before, f"superseded by version {version.version}")] if before else []
    body = {
        "version": version.version,
        **identity(version),
        "snapshot": decision["challenger"]["snapshot"],
        "decided_at": decision["decided_at"],
        "expires": decision["expires"],
        "against": against and {"version": against.version, "weights": against.weights},
    }
    record(registry, lock, [*entries, new_entry("waiting", body)])


def end_stale_waiting(registry: Registry, champion: Version | None) -> None:
    """As `withdraw_stale`, without a lock held; takes one only where there is something to end."""
    waiting = find_waiting(registry)
    if waiting and stale_note(waiting, champion):
        with lock_registry(registry) as lock:
            withdraw_stale(registry, lock, champion)


def withdraw_unanswered(registry: Registry, decided_at: str, answer_by: datetime) -> None:
    """End the waiting of this decision, which nobody approved or declined in time. Unlike a person's withdrawal it may
    be put up again.
    """
    with lock_registry(registry) as lock:
        waiting = find_waiting(registry)
        if waiting and waiting.decided_at == decided_at:
            record(registry, lock, [withdrawal(waiting, f"nobody approved it by {answer_by:%Y-%m-%d %H:%M} UTC")])


def ending_of(registry: Registry, decided_at: str) -> Entry | None:
    """The approval or withdrawal of this decision; None where neither ended it."""
    ended = [
        entry
        for entry in read_journal(registry).of("approval", "withdrawal")
        if entry.body.get("decided_at") == decided_at
    ]
    return ended[-1] if ended else None


def tag_answered_runs(registry: Registry, version: int, decided_at: str, tags: Mapping[str, str]) -> None:
    """Correct the tags of the flows' runs that ended while this decision about the version waited; an earlier one that
    nobody answered is another. A run that found it waiting has a later time.
    """
    with mlflow_errors(registry.settings):
        experiment = registry.client.get_experiment_by_name(registry.settings.experiment)
        where = (
            f"tags.kind = 'flow' and tags.approval = 'waiting' and tags.registered_model = '{registry.model}' "
            f"and tags.registered_version = '{version}'"
        )
        for run in registry.client.search_runs([experiment.experiment_id], where) if experiment else []:
            if run.data.tags.get("decided_at", "") < decided_at:
                continue
            for name, value in tags.items():
                registry.client.set_tag(run.info.run_id, name, value)


def ended_unapproved(registry: Registry) -> str | None:
    """Why the last decision that waited waits no more, where it ended without an approval."""
    waiting, last = find_waiting(registry), last_waiting_entry(registry)
    if waiting is not None:
        note = stale_note(waiting, current_champion(registry))
        return note and f"the decision about version {waiting.version} {note}"
    if last is None or last.kind != "withdrawal":
        return None
    return f"the decision about version {last.body['version']} ended unapproved: {last.body['reason']}"


def withdraw_decided_again(registry: Registry, lock: RegistryLock, files: str) -> None:
    """End the waiting of this model before it is registered again: its version's tags change, and after a kill in
    between it would look edited.
    """
    waiting = find_waiting(registry)
    if waiting and waiting.files == files:
        record(registry, lock, [withdrawal(waiting, "decided again since")])


def withdraw_stale(registry: Registry, lock: RegistryLock, champion: Version | None) -> None:
    """End the waiting of a decision that expired, or whose champion is not `champion` any more."""
    if ended := ending_of_stale(registry, champion):
        record(registry, lock, ended)


def ending_of_stale(registry: Registry, champion: Version | None) -> list[Entry]:
    """The entry that ends the waiting, where one waits and `champion` makes its decision stale."""
    waiting = find_waiting(registry)
    word = stale_note(waiting, champion) if waiting else None
    return [withdrawal(waiting, word)] if waiting and word else []


def withdrawal_note(journal: Journal, weights: str) -> str | None:
    """A sentence where a person took back the decision about these weights, and nobody promoted them since."""
    last: Entry | None = None
    for entry in journal.of("waiting", "withdrawal", "promotion"):
        last = entry if entry.body.get("weights") == weights else last
    if last is None or last.kind != "withdrawal" or last.body.get("override") != "withdraw":
        return None
    return (
        f"Version {last.body['version']} has the same weights, and its promotion was withdrawn at {last.at} by "
        f"{last.by}: {last.body['reason']}."
    )


def stale_note(waiting: Waiting, champion: Version | None) -> str | None:
    if waiting.is_expired():
        return f"expired at {waiting.until}"
    if not waiting.is_against(champion):
        now = f"version {champion.version} is champion" if champion else "there is no champion"
        before = f"version {waiting.against['version']}" if waiting.against else "no champion"
        return f"decided against {before}, and now {now}"
    return None


def withdrawal(waiting: Waiting, reason: str, *, by: str | None = None) -> Entry:
    """The entry that ends a waiting; `by` is the person who asked for it, if any."""
    body = {"version": waiting.version, "weights": waiting.weights, "decided_at": waiting.decided_at, "reason": reason}
    return new_entry("withdrawal", {**body, **({"override": "withdraw"} if by else {})}, by=by)
