"""What the environment's faults cost: calls repeated in place, episodes restarted, episodes dropped, and by which tool.

A few dropped episodes are noise; many are a broken environment, and training on the rest would learn from whatever is
easy enough not to meet it. Above a share the run stops, with the tools to blame in a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tasks.core.records import Trajectory
from tasks.tools.base import EnvironmentFault
from tasks.tools.settings import ToolSettings

MAX_CAUSES = 10


def in_words(counts: Mapping[str, float]) -> str:
    """One line about a stage's totals; empty where there was no fault and no cache."""
    parts = []
    if any(counts[name] for name in ("tool_retries", "episode_restarts", "episodes_dropped")):
        parts.append(
            f"{counts['tool_retries']:,} calls repeated, {counts['episode_restarts']:,} episodes restarted and "
            f"{counts['episodes_dropped']:,} dropped after faults of the environment"
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


class FaultLog:
    """Running totals over all episodes of a stage. `dropped` names each lost episode with its fault.

    `num_finished` begins with those that ended well before a kill: lost ones alone are played again, and a share of
    these few would stop a stage that one go would have let pass.
    """

    def __init__(self, limits: ToolSettings):
        self.limits, self.num_finished = limits, 0
        self.num_retries = 0
        self.restarts: Counter[str] = Counter()
        self.dropped: list[tuple[str, str]] = []

    def restart(self, fault: EnvironmentFault) -> None:
        self.restarts[str(fault)] += 1

    def finish(self, trajectory: Trajectory, *, num_left: int) -> None:
        """Count an episode. TooManyFaults as soon as even a faultless rest of the batch would not save the share."""
        self.num_finished += 1
        if trajectory.fault is None:
            return
        episode = f"{trajectory.problem_id}, draw {trajectory.draw}, sample {trajectory.sample_index}"
        self.dropped.append((episode, trajectory.fault))
        if len(self.dropped) > self.limits.max_dropped_share * (self.num_finished + num_left):
            raise TooManyFaults(self._report(num_left))

    def counts(self) -> dict[str, int]:
        """The totals for the metrics."""
        return {
            "tool_retries": self.num_retries,
            "episode_restarts": self.restarts.total(),
            "episodes_dropped": len(self.dropped),
        }

    def _report(self, num_left: int) -> str:
        total = self.num_finished + num_left
        causes = Counter(fault for _, fault in self.dropped)
        for fault, count in self.restarts.items():
            causes[fault] += count
        lines = [f"  {count:>7}  {fault}" for fault, count in causes.most_common(MAX_CAUSES)]
        return (
            f"the environment lost {len(self.dropped)} of {total} episodes, more than "
            f"environment.tools.max_dropped_share ({self.limits.max_dropped_share:.0%}) allows, so what is left is no "
            f"fair sample. Repair the tools below and run again; what was finished is kept.\n"
            + "\n".join([f"  {'attempts':>7}  tool: fault: what it said", *lines])
        )
