"""The opponent: the champion, or before the first one the model that the challenger grew from; and the anchor.

The anchor, which success may not fall below, is usually the champion. Where the champion was promoted as cheaper, it is
an earlier version that the journal names; if that one was deleted or pruned, the best that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import read_json
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.measurement.statistics import success_rate
from tasks.models.files import POINTER
from tasks.stages.evaluate.results import evaluated_episodes, refuse_other_files
from tasks.stages.promote.checks.cost import Anchor
from tasks.stages.promote.episodes import Conditions, Episodes, KeptEpisodes, episodes_of_version, find_episodes
from tasks.stages.promote.policy import is_next_anchor
from tasks.stages.promote.unseen import Unseen

if TYPE_CHECKING:
    from tasks.stages.promote.challenger import Challenger

HARDEST_SUCCESS = 0.5  # where a difference is hardest to find


class Opponent(NamedTuple):
    """`differing_fields` are the parts of the environment that changed since the champion was promoted."""

    name: str
    episodes: Episodes
    differing_fields: Sequence[str] = ()

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.episodes.trajectories

    def on(self, unseen: Unseen) -> Opponent:
        """Restricted to the unseen problems."""
        return self._replace(episodes=self.episodes._replace(trajectories=unseen.keep(self.trajectories)))


def find_opponent(challenger: Challenger, conditions: Conditions) -> Opponent:
    """The champion on today's `test`, or before the first one what a first champion must beat."""
    from tasks.tracking.lineage import differing_fields

    champion = conditions.champion
    if champion is None:
        return _first_opponent(challenger, conditions)
    fields = differing_fields(champion.tags, conditions.environment.describe())
    episodes = episodes_of_version(champion, conditions)
    return Opponent(f"the champion, version {champion.version}", episodes, fields)


class RecordedSuccess(NamedTuple):
    """Success known before the opponent is measured; `origin` says where it is from, None: from today's test set."""

    rate: float
    origin: str | None


def recorded_success(challenger: Challenger, conditions: Conditions) -> RecordedSuccess:
    """The opponent's, for planning; HARDEST_SUCCESS where none is recorded."""
    if conditions.champion is None:
        evaluation, policy = challenger.evaluation, _first_policy(conditions.paths)
        rate = float(evaluation["test"][policy]["success_rate"])
        is_of_today = evaluation["measurement"]["parts"]["test"] == conditions.parts["test"]
    else:
        tags = conditions.champion.tags
        if "test.success_rate" not in tags:
            return RecordedSuccess(HARDEST_SUCCESS, "assumed, since the champion's success is not recorded")
        rate = float(tags["test.success_rate"])
        card = read_json(conditions.paths.stage("curate") / "card.json")
        is_of_today = tags.get("data_hash.test.jsonl") == card["hashes"]["test.jsonl"]
    return RecordedSuccess(rate, None if is_of_today else "its success on another test set")


def _first_opponent(challenger: Challenger, conditions: Conditions) -> Opponent:
    paths, evaluation, policy = conditions.paths, challenger.evaluation, _first_policy(conditions.paths)
    folder = paths.base_model if policy == "base" else paths.start_model

    def open_unaltered() -> nullcontext[Any]:
        refuse_other_files(folder, evaluation, policy)
        return nullcontext(folder)

    kept = KeptEpisodes(evaluation["measurement"]["parts"], lambda: evaluated_episodes(paths, evaluation, policy))
    name = f"the {policy.replace('_', ' ')}"
    return Opponent(name, find_episodes(name, evaluation["folders"][policy], conditions, kept, open_unaltered))


def _first_policy(paths: Paths) -> str:
    is_pointer = (paths.start_model / POINTER).exists()
    return "base" if is_pointer else "warm_start"


@dataclass(frozen=True, slots=True)
class FoundAnchor(Anchor):
    """The anchor with its version; `deleted` is the version that should be it and is gone from the registry, or has
    lost its weights to `prune`.
    """

    version: int
    deleted: int | None

    @property
    def warning(self) -> str | None:
        if self.deleted is None:
            return None
        return (
            f"Version {self.deleted}, which success may not fall below, was deleted from the registry or lost its "
            f"weights to `prune`; of those left, {self.name} is best and takes its place."
        )

    def to_row(self, challenger: list[Trajectory], *, alpha: float) -> dict[str, Any]:
        """Its part of decision.json; `is_next`: whether the challenger would be the anchor as champion."""
        return {
            "name": self.name,
            "version": self.version,
            "success_rate": success_rate(self.trajectories),
            "deleted": self.deleted,
            "is_next": is_next_anchor(challenger, self, alpha=alpha),
        }


def find_anchor(opponent: Opponent, unseen: Unseen, conditions: Conditions) -> FoundAnchor | None:
    """The anchor that the journal names, None before the first champion, with its episodes on the `unseen` problems."""
    from tasks.tracking.history import anchors, summarise_journal

    registry, champion = conditions.registry, conditions.champion
    if champion is None:
        return None
    path, pruned = anchors(conditions.journal.entries), summarise_journal(conditions.journal.entries).pruned
    left = (number for number in reversed(path) if number not in pruned and registry.exists(number))
    number = next(left, None)
    deleted = path[-1] if path and path[-1] != number else None
    of_champion = FoundAnchor(opponent.name, opponent.trajectories, champion.version, deleted)
    version = None if number is None else registry.version(number)
    if version is None or version.version == champion.version:
        return of_champion
    played = unseen.keep(episodes_of_version(version, conditions).trajectories)
    found = FoundAnchor(f"the anchor, version {version.version}", played, version.version, deleted)
    # The deleted anchor was better than the one before it, and the champion almost as good as the deleted one.
    return max(of_champion, found, key=lambda anchor: success_rate(anchor.trajectories)) if deleted else found


def unmeasured_anchor_row(conditions: Conditions) -> dict[str, Any] | None:
    """Its part of decision.json where nothing could be measured: the anchor stays."""
    from tasks.tracking.history import anchors

    path = anchors(conditions.journal.entries)
    if not path:
        return None
    return {"name": f"version {path[-1]}", "version": path[-1], "success_rate": None, "deleted": None, "is_next": False}
