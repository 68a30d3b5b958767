"""How often the model succeeds after an attempt, on the problems that assess's gate looked at first."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tasks.core.records import Problem, Trajectory
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.environments.catalog import load_environment
from tasks.rollouts.collect import sample_episodes
from tasks.rollouts.finished import FinishedEpisodes
from tasks.stages.warm_start.settings import WarmStartSections


def checked_problems(paths: Paths, num_problems: int) -> list[Problem]:
    """Those of select by which attempts are compared."""
    return read_split(paths, "select")[:num_problems]


def measure_success(
    model: Path, settings: WarmStartSections, paths: Paths, *, num_problems: int, finished: Path
) -> float:
    """The share solved of up to `num_problems` of select, one episode each, drawn as training draws. What the
    environment lost counts as failed, so that no attempt gains by what it crashes (infra/decisions/0095); ValueError
    where it lost everything.
    """
    problems = checked_problems(paths, num_problems)
    with closing(load_environment(settings.environment)) as environment:
        played = sample_episodes(
            model,
            environment,
            problems,
            settings.play(1),
            stage="warm_start",
            label="warm start: success",
            finished=FinishedEpisodes(finished),
        )
    if all(trajectory.is_lost for trajectory in played):
        raise ValueError(
            "the environment lost every episode of the warm start's check, so its success is not known. Correct the "
            "environment, or set warm_start.stop to null."
        )
    return sum(trajectory.is_success for trajectory in played) / len(played)


def read_played(paths: Paths, *, num_problems: int, finished: Path) -> list[Trajectory]:
    """The episodes that `measure_success` played and the environment did not lose, in the order of the problems."""
    kept = FinishedEpisodes(finished)
    episodes = [(problem.id, 0) for problem in checked_problems(paths, num_problems)]
    return kept.read([episode for episode in episodes if episode in kept])
