"""Does GRPO through the gateway raise the success of an agent that drives itself? And does a real model play alike?

The test profile's world and model: a program's loop over HTTP and MCP, one thread per agent. infra/benchmarks.md has
what was measured. About three minutes of two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.core.records import Problem, Trajectory
from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.measurement.intervals import clustered_interval
from tasks.rollouts.collect import Collector
from tasks.rollouts.conversation import EpisodeKey
from tasks.stages.assess import stage as assess
from tasks.stages.curate import stage as curate
from tasks.stages.train.run import TrainingRun
from tasks.stages.train.settings import TrainSections
from tasks.stages.warm_start import stage as warm_start
from tests.profiles import profile_params
from tests.rollouts.agents.conftest import agent_settings

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1_800)]
ITERATIONS = 16


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    paths = Paths(tmp_path_factory.mktemp("agents"))
    for stage in (curate, assess, warm_start):
        stage.run(load(stage.SETTINGS, params_of(paths, of_agent=False)), paths)
    return paths


def params_of(paths: Paths, *, of_agent: bool) -> dict[str, Any]:
    params = profile_params("test")
    params["paths"]["artifacts"] = str(paths.artifacts)
    params["train"] |= {"num_iterations": ITERATIONS, "snapshot_interval": 1000}
    if of_agent:
        params["environment"] |= {"name": "agent", "settings": agent_settings()}
    return params


def training(paths: Paths, resume: Path, *, of_agent: bool) -> TrainingRun:
    return TrainingRun(
        load(TrainSections, params_of(paths, of_agent=of_agent)),
        start=paths.start_model,
        problems=read_split(paths, "train"),
        resume=resume,
    )


def play(run: TrainingRun, problems: Sequence[Problem]) -> list[Trajectory]:
    run.serving.refresh(run.iteration)
    collector = Collector(run.episodes, run.environment, max_concurrent_episodes=64, seed=0, stage="held-out")
    return collector.collect([EpisodeKey(problem, 0, 0) for problem in problems])


def test_a_sampled_model_plays_alike_until_it_writes_what_is_no_call(start: Paths, tmp_path: Path):
    """An agent gets a malformed call as text, and our own loop answers it; all other episodes are equal."""
    problems, played = read_split(start, "test"), list[list[Trajectory]]()
    for of_agent in (False, True):
        with closing(training(start, tmp_path / str(of_agent), of_agent=of_agent)) as run:
            played.append(play(run, problems))
    well_formed = [
        (own, theirs)
        for own, theirs in zip(*played, strict=True)
        if not any({"malformed": True} in turn.calls for turn in own.turns)
    ]
    apart = 0.0
    for own, theirs in well_formed:
        assert (own.turns, own.outcome, own.checks) == (theirs.turns, theirs.outcome, theirs.checks)
        assert [sequence.token_ids for sequence in own.sequences] == [item.token_ids for item in theirs.sequences]
        pairs = zip(own.sequences[0].sampler_logp, theirs.sequences[0].sampler_logp, strict=True)
        apart = max(apart, *(abs(one - other) for one, other in pairs))
    print(f"\n{len(well_formed)} of {len(problems)} episodes have no malformed call; all of these have the same ids")
    print(f"log-probs are at most {apart:.1e} nats apart: other episodes share the engine's steps")
    assert apart < 1e-5
    assert len(well_formed) > len(problems) / 4


def test_training_through_the_gateway_raises_success(start: Paths, tmp_path: Path):
    held_out = [*read_split(start, "select"), *read_split(start, "test")]
    with closing(training(start, tmp_path / "resume", of_agent=True)) as run:
        before = play(run, held_out)
        rows = list[dict[str, Any]]()
        while not run.is_done:
            row, alarm = run.iterate()
            assert alarm is None, alarm
            rows.append(row)
        after = play(run, held_out)
        seconds = sum(item["collect_seconds"] for item in run.timings()["train"])
    solved = [[float(item.is_success) for item in played] for played in (before, after)]
    groups = [item.split_group for item in held_out]
    intervals = [clustered_interval(values, groups, confidence=0.95) for values in solved]
    num_episodes = sum(row["num_episodes"] for row in rows)
    print(f"\nsuccess on {len(held_out)} held-out problems: {[sum(values) for values in solved]}, {intervals}")
    print(f"{num_episodes:,} episodes of agents in {seconds:.0f} s of collection")
    assert intervals[0][1] < intervals[1][0]
