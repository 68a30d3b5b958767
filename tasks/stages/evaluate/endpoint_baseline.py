"""The model behind an endpoint (`evaluate.frontier`) on `test`, for comparison only. Episodes cost money, so each is
stored as it ends, and a resumed stage requests only the missing ones.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.records import Problem, Trajectory
from tasks.engines.endpoint.settings import FrontierSettings
from tasks.stages.evaluate.settings import EvaluateSections

if TYPE_CHECKING:
    from tasks.tools.base import Environment


def measure_endpoint(
    settings: EvaluateSections, environment: Environment, problems: list[Problem], resume: Path
) -> list[Trajectory]:
    """Episodes of evaluate.frontier, none where it is null; tools draw the same random numbers as for other models."""
    from tasks.engines.endpoint.client import Endpoint
    from tasks.engines.endpoint.episode import play_endpoint
    from tasks.rollouts.finished import FinishedEpisodes

    if settings.evaluate.frontier is None:
        return []
    with closing(Endpoint(settings.evaluate.frontier)) as endpoint:
        return play_endpoint(
            endpoint,
            environment,
            problems,
            max_turns=settings.sampling.max_turns,
            seed=settings.seed,
            label=f"test: {endpoint.name}",
            finished=FinishedEpisodes(resume / "test_frontier.jsonl"),
        )


def frontier_row(
    frontier: FrontierSettings, played: list[Trajectory], best: list[Trajectory], *, confidence: float
) -> dict[str, Any]:
    """The endpoint's result and usage, and the best snapshot's difference from it on the same problems."""
    from tasks.measurement.statistics import paired_difference, summarise
    from tasks.measurement.usage import mean_usage

    problems = {trajectory.problem_id for trajectory in played}
    on_the_same = [trajectory for trajectory in best if trajectory.problem_id in problems]
    usage = mean_usage(played)
    return {
        **frontier.model_dump(include={"model", "url", "temperature", "max_output_tokens"}),
        "is_reproducible": False,  # an endpoint ignores our seeds and may change the model behind a name
        "result": {**summarise(played, confidence=confidence), "mean_sampled_tokens": usage["output_tokens"]},
        "usage_per_episode": usage,
        "best_minus_frontier": paired_difference(on_the_same, played, confidence=confidence),
    }
