"""One training of travel_desk with four levels, by one sampler and seed, with success on the hardest level as it goes.

`python -m tests.benchmarks.curriculum FOLDER POOL SAMPLER SEED` prints a line of JSON per measurement. FOLDER has the
start that all share, which `prepare` makes: curated problems, and a model that was shown levels 1 to 3 and only
`HARD_DEMONSTRATIONS` of level 4, so that the hardest level is hard and not impossible. POOL is `curated` (as many
problems of each of 17 categories), `half_mastered` (half are cancellations, which the start always solves) or
`new_level`: the curated ones again, for a policy that `prepare` trained on levels 1 to 3 before, as when an agent in
production meets new problems. Held-out problems are the hardest of select and test. Every sampler begins with episodes
of its start, as in the train stage.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.core.files import read_jsonl, write_jsonl
from tasks.core.records import Group, Problem, Trajectory
from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.learning.grpo.solve_rates import Played
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.stages.assess import stage as assess
from tasks.stages.curate import stage as curate
from tasks.stages.train.outlook import baseline_of, read_baseline
from tasks.stages.train.run import TrainingRun
from tasks.stages.train.settings import TrainSections
from tasks.stages.warm_start import stage as warm_start
from tests.profiles import profile_params

MASTERED = 1  # cancellations
HARDEST = 4  # changes of a booking: a cancellation and a booking in one request
HARD_DEMONSTRATIONS = 40  # of 800 of the hardest level
TARGETS = {"curated": 0.4, "half_mastered": 0.3, "new_level": 0.5}  # of the held-out problems
ITERATIONS, INTERVAL = 56, 4
EARLIER_ITERATIONS = 60  # on levels 1 to 3, before level 4 is new
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
    params["warm_start"]["stop"] |= {"num_problems": 340, "max_attempts": 1}
    params["sampling"] |= {"max_turns": 12, "max_tokens_per_episode": 480}
    params["train"] |= {
        "num_iterations": ITERATIONS, "snapshot_interval": 1000, "checkpoint_interval": 1000, "schedule": "constant",
        "problems_per_iteration": 12,
    }  # fmt: skip
    return params


def prepare(folder: Path) -> None:
    paths = Paths(folder)
    for stage in (curate, assess):
        stage.run(load(stage.SETTINGS, params_of(folder)), paths)
    leave_out_demonstrations(paths)
    warm_start.run(load(warm_start.SETTINGS, params_of(folder)), paths)
    train_on_earlier_levels(folder)


def train_on_earlier_levels(folder: Path) -> None:
    """Leaves `earlier/model` and the episodes on select that tell what it solves."""
    params, paths = params_of(folder), Paths(folder)
    params["train"] |= {"num_iterations": EARLIER_ITERATIONS, "problems_per_iteration": 16}
    params["train"] |= {"problem_sampler": "uniform", "snapshot_interval": EARLIER_ITERATIONS}
    problems = [problem for problem in read_split(paths, "train") if problem.level != HARDEST]
    with tempfile.TemporaryDirectory() as resume:
        start = paths.start_model
        run = TrainingRun(load(TrainSections, params), start=start, problems=problems, resume=Path(resume))
        with closing(run):
            while not run.is_done:
                run.iterate()
            played = play(run, read_split(paths, "select"))
            write_jsonl(folder / "earlier" / "trajectories.jsonl", [item.to_row() for item in played])
            run.snapshots.export(folder / "earlier")


def start_of(folder: Path, pool: str) -> tuple[Path, Sequence[Played]]:
    """The weights that training begins from, and what is known of them."""
    paths = Paths(folder)
    if pool != "new_level":
        baseline = read_baseline(paths)
        assert baseline is not None
        return paths.start_model, baseline.played
    rows = [Trajectory.from_row(row) for _, row in read_jsonl(folder / "earlier" / "trajectories.jsonl")]
    baseline = baseline_of(rows, read_split(paths, "select"))
    assert baseline is not None
    return folder / "earlier" / f"iteration-{EARLIER_ITERATIONS:04d}", baseline.played


def leave_out_demonstrations(paths: Paths) -> None:
    """Of the hardest level, all but the first `HARD_DEMONSTRATIONS`."""
    file = paths.stage("curate") / "demonstrations.jsonl"
    hardest = {problem.id for problem in read_split(paths, "train") if problem.level == HARDEST}
    rows = [row for _, row in read_jsonl(file)]
    hard = [row for row in rows if row["problem_id"] in hardest][:HARD_DEMONSTRATIONS]
    write_jsonl(file, [row for row in rows if row["problem_id"] not in hardest or row in hard])


def training_problems(paths: Paths, pool: str) -> list[Problem]:
    problems = read_split(paths, "train")
    if pool != "half_mastered":
        return problems
    mastered = [problem for problem in problems if problem.level == MASTERED]
    return mastered + [problem for problem in problems if problem.level != MASTERED][: len(mastered)]


def train(folder: Path, pool: str, sampler: str, seed: int) -> Iterator[dict[str, Any]]:
    """A row at the start and after every `INTERVAL` iterations: the training episodes so far, held-out success on the
    hardest level, and what was drawn since the row before. The last is that of the target, or of the last iteration.
    """
    params, paths = params_of(folder), Paths(folder)
    chosen = SAMPLERS[sampler]
    params["train"] |= {**chosen, "band": {**params["train"]["band"], **chosen.get("band", {})}}
    params["seed"] = seed
    problems = training_problems(paths, pool)
    start, baseline = start_of(folder, pool)
    level_of = {problem.id: problem.level for problem in problems}
    held_out = [item for split in ("select", "test") for item in read_split(paths, split) if item.level == HARDEST]
    with tempfile.TemporaryDirectory() as resume:
        run = TrainingRun(
            load(TrainSections, params),
            start=start,
            problems=problems,
            resume=Path(resume),
            baseline=baseline,
        )
        with closing(run):
            hardest, episodes, groups = success(run, held_out), 0, list[Group]()
            yield {"iteration": 0, "episodes": 0, "hardest": hardest}
            while not run.is_done and hardest < TARGETS[pool]:
                row, alarm = run.iterate()
                assert alarm is None, alarm
                episodes += row["num_episodes"]
                groups += run.trainer.last_groups
                if run.iteration % INTERVAL == 0:
                    hardest = success(run, held_out)
                    drawn = by_level(groups, level_of)
                    yield {"iteration": run.iteration, "episodes": episodes, "hardest": hardest, "drawn": drawn}
                    groups = []


def by_level(groups: Sequence[Group], level_of: dict[str, int]) -> dict[int, dict[str, float]]:
    """Of the groups of each level: the share of all groups, the mean solve rate, and the share with signal."""
    rates = defaultdict[int, list[float]](list)
    for group in groups:
        solved = sum(trajectory.is_success for trajectory in group.trajectories)
        rates[level_of[group.problem_id]].append(solved / len(group.trajectories))
    return {
        level: {
            "share": len(found) / len(groups),
            "solved": sum(found) / len(found),
            "signal": sum(0 < rate < 1 for rate in found) / len(found),
        }
        for level, found in sorted(rates.items())
    }


def success(run: TrainingRun, problems: Sequence[Problem]) -> float:
    played = play(run, problems)
    return sum(trajectory.is_success for trajectory in played) / len(played)


def play(run: TrainingRun, problems: Sequence[Problem]) -> Sequence[Trajectory]:
    """By the present weights, one episode per problem, with the same draws each time."""
    run.serving.refresh(run.iteration)
    episodes = EngineEpisodes(run.engine, run.chat, run.settings.sampling)
    collector = Collector(episodes, run.environment, max_concurrent_episodes=256, seed=0, stage="held-out")
    return collector.collect([EpisodeKey(problem, 0, 0) for problem in problems])


def episodes_until(rows: Sequence[dict[str, Any]], target: float) -> int | None:
    """Training episodes when success on the hardest level first reached the target; None where it never did."""
    return next((row["episodes"] for row in rows if row["hardest"] >= target), None)


if __name__ == "__main__":
    place, mix, name, number = sys.argv[1:]
    for line in train(Path(place), mix, name, int(number)):
        print(json.dumps(line), flush=True)
