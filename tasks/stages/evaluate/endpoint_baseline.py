"""The model behind an endpoint, as a yardstick on `test`: its episodes, and what `evaluate` says about them.

Nothing is decided by it (infra/decisions/0012). Episodes cost money, so they are kept as they end and are not asked for
again by a stage that goes on after a kill.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.records import Problem, Trajectory
from tasks.engines.endpoint.settings import FrontierSettings

if TYPE_CHECKING:
    from tasks.tools.base import Environment


def play_frontier(
    frontier: FrontierSettings,
    world: Environment,
    problems: list[Problem],
    *,
    max_turns: int,
    seed: int,
    finished: Path,
) -> list[Trajectory]:
    """Episodes of the model behind the endpoint; the random numbers of its tools are those other models meet."""
    from tasks.engines.endpoint.client import Endpoint
    from tasks.engines.endpoint.episode import play_endpoint
    from tasks.rollouts.finished import FinishedEpisodes

    with closing(Endpoint(frontier)) as endpoint:
        return play_endpoint(
            endpoint,
            world,
            problems,
            max_turns=max_turns,
            seed=seed,
            stage="test",
            label=f"test: {endpoint.name}",
            finished=FinishedEpisodes(finished),
        )


def frontier_row(
    frontier: FrontierSettings, played: list[Trajectory], best: list[Trajectory], *, confidence: float
) -> dict[str, Any]:
    """The frontier model's result, what it took, and how far the best snapshot is from it on the same problems."""
    from tasks.measurement.statistics import paired_difference, summarise
    from tasks.measurement.usage import mean_usage

    problems = {trajectory.problem_id for trajectory in played}
    on_the_same = [trajectory for trajectory in best if trajectory.problem_id in problems]
    usage = mean_usage(played)
    return {
        **frontier.model_dump(include={"model", "url", "temperature", "max_output_tokens"}),
        "is_reproducible": False,  # an endpoint takes no seed of ours and may change the model behind a name
        "result": {**summarise(played, confidence=confidence), "mean_sampled_tokens": usage["output_tokens"]},
        "usage_per_episode": usage,
        "best_minus_frontier": paired_difference(on_the_same, played, confidence=confidence),
    }
