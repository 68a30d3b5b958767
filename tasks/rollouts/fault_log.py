"""What the environment's faults cost: calls repeated, episodes restarted and dropped, and by which tool.

A few dropped episodes are noise. Many mean a broken environment, and the rest would be a biased training set of easy
problems, so above a share the run stops with a table of the tools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.core.records import Trajectory
from tasks.core.text import counted
from tasks.tools.base import EnvironmentFault
from tasks.tools.settings import ToolSettings

MAX_CAUSES = 10


def in_words(counts: Mapping[str, float]) -> str:
    """One line of a stage's totals; empty where there was no fault and no cache."""
    parts = []
    if any(counts[name] for name in ("tool_retries", "episode_restarts", "episodes_dropped")):
        parts.append(
            f"{counted(counts['tool_retries'], 'call')} repeated, {counted(counts['episode_restarts'], 'episode')} "
            f"restarted and {counts['episodes_dropped']:,} dropped after faults of the environment"
        )
    hits, misses = counts.get("tool_cache_hits", 0), counts.get("tool_cache_misses", 0)
    if hits + misses:
        parts.append(f"tool cache: {hits:,} of {hits + misses:,} answers ({hits / (hits + misses):.1%})")
    if queries := counts.get("prefix_cache_queries", 0):
        hits = counts["prefix_cache_hits"]
        parts.append(f"prefix cache: {hits:,} of {queries:,} prompt tokens ({hits / queries:.1%})")
    return "; ".join(parts)


class TooManyFaults(ValueError):
    """The environment lost more episodes than `environment.tools.max_dropped_share` allows."""


@dataclass(slots=True)
class JudgedTogether:
    """Plays of which no single one is long enough to judge an environment by its share of lost episodes: those of the
    plays that ended, and those of the plays to come.
    """

    num_to_come: int
    num_finished: int = 0
    num_lost: int = 0

    def begin(self, num_episodes: int) -> None:
        self.num_to_come -= num_episodes

    def end(self, played: Sequence[Trajectory]) -> None:
        self.num_finished += len(played)
        self.num_lost += sum(trajectory.fault is not None for trajectory in played)


class FaultLog:
    """Running totals over all episodes of a stage; `dropped` has each lost episode with its fault, and `others` are
    judged together with them.

    `num_finished` starts with the episodes that ended well before a kill: only lost ones are played again, and a share
    of these few would stop a stage that one uninterrupted run would have passed.
    """

    def __init__(self, limits: ToolSettings, others: JudgedTogether | None = None):
        self.limits, self.num_finished, self.others = limits, 0, others or JudgedTogether(0)
        self.num_retries = 0
        self.restarts: Counter[str] = Counter()
        self.dropped: list[tuple[str, str]] = []

    def state(self) -> dict[str, int]:
        """The totals that the share of lost episodes is judged by, which a resumed run goes on from."""
        return {
            "num_finished": self.num_finished + self.others.num_finished,
            "num_lost": len(self.dropped) + self.others.num_lost,
        }

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from these totals, whatever was counted here: in a new process, or after batches were given up."""
        self.others.num_finished = state["num_finished"] - self.num_finished
        self.others.num_lost = state["num_lost"] - len(self.dropped)

    def restart(self, fault: EnvironmentFault) -> None:
        self.restarts[str(fault)] += 1

    def finish(self, trajectory: Trajectory, *, num_left: int) -> None:
        """TooManyFaults as soon as even a faultless rest of the batch, and of what is judged with it, would exceed the
        share.
        """
        self.num_finished += 1
        if trajectory.fault is None:
            return
        episode = f"{trajectory.problem_id}, draw {trajectory.draw}, sample {trajectory.sample_index}"
        self.dropped.append((episode, trajectory.fault))
        num_lost, total = len(self.dropped) + self.others.num_lost, self._total(num_left)
        if num_lost > self.limits.max_dropped_share * total:
            raise TooManyFaults(self._report(num_lost, total))

    def _total(self, num_left: int) -> int:
        return self.num_finished + num_left + self.others.num_finished + self.others.num_to_come

    def counts(self) -> dict[str, int]:
        return {
            "tool_retries": self.num_retries,
            "episode_restarts": self.restarts.total(),
            "episodes_dropped": len(self.dropped),
        }

    def _report(self, num_lost: int, total: int) -> str:
        causes = Counter(fault for _, fault in self.dropped)
        for fault, count in self.restarts.items():
            causes[fault] += count
        lines = [f"  {count:>7}  {fault}" for fault, count in causes.most_common(MAX_CAUSES)]
        return (
            f"the environment lost {num_lost} of {total} episodes, more than "
            f"environment.tools.max_dropped_share ({self.limits.max_dropped_share:.0%}) allows, so the rest is no fair "
            f"sample. Repair the tools below and run again; finished episodes are kept.\n"
            + "\n".join([f"  {'attempts':>7}  tool: fault: message", *lines])
        )
