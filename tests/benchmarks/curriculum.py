"""One training of travel_desk with four levels, by one sampler and seed, with success on the hardest level as it goes.

`python -m tests.benchmarks.curriculum FOLDER MIX SAMPLER SEED` prints a line of JSON per measurement. FOLDER has the
start that all share, which `prepare` makes: curated problems and the warm-started model. Held-out problems are of
select. MIX is `categories` (as curated: as many problems of each of 17 categories, so one in 17 is a cancellation,
which the start always solves) or `levels` (as many of each level, so one in four is).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.core.records import Problem
from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.stages.assess import stage as assess
from tasks.stages.curate import stage as curate
from tasks.stages.train.run import TrainingRun
from tasks.stages.train.settings import TrainSections
from tasks.stages.warm_start import stage as warm_start
from tests.profiles import profile_params

HARDEST = 4  # changes of a booking: a cancellation and a booking in one request
TARGETS = {"categories": 0.6, "levels": 0.5}  # of the hardest level's held-out problems; the start solves a third
PER_LEVEL = 280  # problems, in the mix of levels
ITERATIONS, INTERVAL = 45, 3
LEVELS = {"by": "level", "open_at": 0.5, "confidence": 0.9}
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {"problem_sampler": "uniform"},
    "adaptive": {"problem_sampler": "adaptive"},
    "band": {"problem_sampler": "band"},
    "levels": {"problem_sampler": "band", "band": {"levels": LEVELS}},
}


def params_of(folder: Path) -> dict[str, Any]:
    """The demo's with four levels, on one thread, with a constant rate, so that no schedule favours the slower."""
    params = profile_params("demo")
    params["paths"]["artifacts"] = str(folder)
    params["compute"] |= {"num_threads": 1}
    params["curate"] |= {"num_generated": 6800, "max_level": 4, "max_select_problems": 340, "max_test_problems": 340}
    params["assess"] |= {"num_problems": 34, "max_episodes": 34}
    params["sampling"] |= {"max_turns": 12, "max_tokens_per_episode": 480}
    params["train"] |= {
        "num_iterations": ITERATIONS, "snapshot_interval": 1000, "checkpoint_interval": 1000, "schedule": "constant",
        "problems_per_iteration": 12,
    }  # fmt: skip
    return params


def prepare(folder: Path) -> None:
    for stage in (curate, assess, warm_start):
        stage.run(load(stage.SETTINGS, params_of(folder)), Paths(folder))


def training_problems(paths: Paths, mix: str) -> list[Problem]:
    problems = read_split(paths, "train")
    if mix == "categories":
        return problems
    by_level: dict[int, list[Problem]] = {}
    for problem in problems:
        by_level.setdefault(problem.level, []).append(problem)
    return [problem for level in sorted(by_level) for problem in by_level[level][:PER_LEVEL]]


def train(folder: Path, mix: str, sampler: str, seed: int) -> Iterator[dict[str, Any]]:
    """A row at the start and after every `INTERVAL` iterations: the training episodes so far and held-out success on
    the hardest level. The last is that of the target, or of the last iteration.
    """
    params, paths = params_of(folder), Paths(folder)
    chosen = SAMPLERS[sampler]
    params["train"] |= {**chosen, "band": {**params["train"]["band"], **chosen.get("band", {})}}
    params["seed"] = seed
    held_out = [problem for problem in read_split(paths, "select") if problem.level == HARDEST]
    with tempfile.TemporaryDirectory() as resume:
        run = TrainingRun(
            load(TrainSections, params),
            start=paths.stage("warm_start") / "model",
            problems=training_problems(paths, mix),
            resume=Path(resume),
        )
        with closing(run):
            hardest, episodes, rows = success(run, held_out), 0, list[dict[str, Any]]()
            yield {"iteration": 0, "episodes": 0, "hardest": hardest}
            while not run.is_done and hardest < TARGETS[mix]:
                row, alarm = run.iterate()
                assert alarm is None, alarm
                episodes += row["num_episodes"]
                rows.append(row)
                if run.iteration % INTERVAL == 0:
                    hardest = success(run, held_out)
                    yield {"iteration": run.iteration, "episodes": episodes, "hardest": hardest, **means(rows)}
                    rows = []


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = ("success_rate", "informative_group_share", "expected_informative_share", "open_level")
    return {name: sum(row[name] for row in rows) / len(rows) for name in names if name in rows[0]}


def success(run: TrainingRun, problems: Sequence[Problem]) -> float:
    """Of the present weights, one episode per problem, with the same draws each time."""
    run.serving.refresh(run.iteration)
    episodes = EngineEpisodes(run.engine, run.chat, run.settings.sampling)
    collector = Collector(episodes, run.environment, max_concurrent_episodes=256, seed=0, stage="held-out")
    played = collector.collect([EpisodeKey(problem, 0, 0) for problem in problems])
    return sum(trajectory.is_success for trajectory in played) / len(played)


def episodes_until(rows: Sequence[dict[str, Any]], target: float) -> int | None:
    """Training episodes when success on the hardest level first reached the target; None where it never did."""
    return next((row["episodes"] for row in rows if row["hardest"] >= target), None)


if __name__ == "__main__":
    place, split, name, number = sys.argv[1:]
    for line in train(Path(place), split, name, int(number)):
        print(json.dumps(line), flush=True)
