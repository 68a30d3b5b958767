"""Does GRPO raise the success of an agent that nobody here wrote? LangGraph, in its own environment, many at once.

The test profile's world and model, which imitates the format of calls after its warm start. Needs `make setup-agents`.
The fleet's program is started once; infra/benchmarks.md has what was measured.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tasks.core.settings import Paths, load
from tasks.core.splits import read_split
from tasks.measurement.statistics import paired_difference
from tasks.stages.train.run import TrainingRun
from tasks.stages.train.settings import TrainSections
from tests.agents_of_others import python_of
from tests.benchmarks.test_agents import params_of, play, start
from tests.conftest import ROOT
from tests.rollouts.agents.conftest import agent_settings
from tests.worlds import as_custom

__all__ = ["start"]  # a fixture: the warm start
pytestmark = [pytest.mark.bench, pytest.mark.timeout(3_600)]
ITERATIONS = 10
EXAMPLES = ROOT / "infra" / "examples" / "agents"
FLEET = as_custom("infra.examples.agents.fleet")


def langgraph(paths: Paths) -> dict[str, Any]:
    params = params_of(paths, of_agent=True)
    params["train"]["num_iterations"] = ITERATIONS
    params["environment"]["settings"] = agent_settings(object=f"{FLEET}:play", deadline_seconds=600.0)
    return params


def test_grpo_raises_the_success_of_a_langgraph_agent(start: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLEET", f"{python_of('langgraph')} {EXAMPLES / 'langgraph_fleet.py'}")
    held_out = [*read_split(start, "select"), *read_split(start, "test")]
    sections = load(TrainSections, langgraph(start))
    model = start.stage("warm_start") / "model"
    run = TrainingRun(sections, start=model, problems=read_split(start, "train"), resume=tmp_path / "resume")
    with closing(run):
        before, rows = play(run, held_out), list[dict[str, Any]]()
        while not run.is_done:
            row, alarm = run.iterate()
            assert alarm is None, alarm
            rows.append(row)
            print(f"iteration {len(rows)}: {row['success_rate']:.2f}", flush=True)
        after = play(run, held_out)
        seconds = sum(item["collect_seconds"] for item in run.timings()["train"])
    won = [sum(item.is_success for item in played) for played in (before, after)]
    gained = paired_difference(after, before, confidence=0.95)
    print(f"\nsolved of {len(held_out)} held-out problems: {won}; difference {gained}")
    print(f"{sum(row['num_episodes'] for row in rows):,} episodes of LangGraph in {seconds:.0f} s of collection")
    assert {len(item.sequences) for item in after} == {1}
    assert gained["ci_low"] > 0
