"""A thinking model learns: the demo with the profile `thinking`, against the demo without thoughts.

Takes 10 to 30 minutes, and as long again where this folder has no finished demo to compare with. The figures are in
infra/benchmarks.md, "The demo with thoughts".
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasks.core.files import read_json, read_jsonl
from tasks.core.records import Trajectory
from tests.benchmarks.demo import demo_artifacts
from tests.pipeline.project import Project, make_project

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7200)]
FLOW_SECONDS = 5400  # 25 min beside seven other programs


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished run; every test below looks at this one."""
    project = make_project(tmp_path_factory.mktemp("thinking") / "project", profile="thinking")
    done = project.run("flows", "run", timeout=FLOW_SECONDS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return project


@pytest.fixture(scope="module")
def played(thinking: Project) -> list[Trajectory]:
    """The test episodes of the chosen snapshot."""
    file = thinking.artifacts / "evaluate" / "trajectories" / "test_best.jsonl"
    return [Trajectory.from_row(row) for _, row in read_jsonl(file)]


def test_it_reaches_what_the_plain_model_reaches(thinking: Project) -> None:
    plain = read_json(demo_artifacts().stage("evaluate") / "evaluation.json")["test"]["best"]
    summary: dict[str, Any] = read_json(thinking.artifacts / "summary.json")
    best, start = summary["test"], summary["warm_start"]
    print(f"plain {plain['success_rate']:.1%}, thinking {best['success_rate']:.1%}, from {start['success_rate']:.1%}")
    assert summary["baseline"]["success_rate"] < 0.02
    assert best["ci_low"] > start["ci_high"]
    assert best["ci_high"] >= plain["success_rate"]  # its interval has the plain model's rate, or is above it


def test_nearly_every_turn_has_a_thought_within_its_budget(thinking: Project, played: list[Trajectory]) -> None:
    budget = thinking.params()["sampling"]["max_thinking_tokens_per_turn"]
    turns = [turn for item in played for turn in item.turns]
    assert sum(turn.thought is not None for turn in turns) > 0.99 * len(turns)
    assert max(turn.num_thought_tokens for turn in turns) <= budget
    best = thinking.evaluation()["test"]["best"]
    assert 0 < best["mean_thinking_tokens"] < best["mean_sampled_tokens"]


def test_the_loss_sees_thoughts_and_what_closes_a_cut_one_is_masked(played: list[Trajectory]) -> None:
    """An id that the policy did not choose has no log-prob of its sampler; thoughts are among those it chose."""
    for item in played:
        pairs = zip(item.sequences[0].sampled_mask, item.sequences[0].sampler_logp, strict=True)
        assert all(is_sampled or logp == 0 for is_sampled, logp in pairs)
        assert item.num_sampled_tokens > item.num_thought_tokens > 0


def test_the_browser_shows_the_thoughts(thinking: Project, played: list[Trajectory]) -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in (thinking.artifacts / "report").rglob("*.js"))
    thoughts = {turn.thought.strip() for item in played for turn in item.turns if turn.thought}
    assert '"thought":' in shown.replace(" ", "")
    assert any(json.dumps(thought)[1:-1] in shown for thought in thoughts)
