"""The trajectories that earned most without success: what a person reads when reward and success part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.core.records import Group
from tasks.stages.train.alarms import Alarm

SHOWN = 5


@dataclass(frozen=True, slots=True)
class UnearnedEpisode:
    problem_id: str
    draw: int
    sample_index: int
    outcome: str
    reward: float
    parts: dict[str, float]


def most_unearned(groups: Sequence[Group]) -> list[UnearnedEpisode]:
    """Failed episodes by what they earned, the most first."""
    failed = [
        UnearnedEpisode(played.problem_id, played.draw, played.sample_index, played.outcome, score.reward, score.parts)
        for group in groups
        for played, score in zip(group.trajectories, group.scores, strict=True)
        if not played.is_success
    ]
    return sorted(failed, key=lambda episode: (-episode.reward, episode.problem_id, episode.sample_index))[:SHOWN]


def name_unearned(alarm: Alarm | None, groups: Sequence[Group]) -> Alarm | None:
    """The alarm about unearned reward, with the trajectories of its last iteration that earned most."""
    if alarm is None or alarm.signal != "unearned_reward":
        return alarm
    named = [
        f"{episode.problem_id} (draw {episode.draw}, sample {episode.sample_index}: {episode.reward:.2f})"
        for episode in most_unearned(groups)
    ]
    return replace(alarm, message=f"{alarm.message} They are {', '.join(named)}.") if named else alarm
