"""GRPO on an agent that nobody here wrote, of the OpenAI Agents SDK, from its problems to its evaluation.

Each episode is a process of its own that imports the SDK (two seconds of a processor), so the run is short: 12
iterations of 36 episodes on the first level of the travel desk, at the temperature of the test profile.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import FIGURES, ROOT
from tests.pipeline.project import make_project

pytestmark = [pytest.mark.bench, pytest.mark.agents, pytest.mark.timeout(7200)]
PYTHON = ROOT / ".cache" / "agents" / "openai-agents" / "bin" / "python"
NUM_ITERATIONS = 12


def test_grpo_raises_the_success_of_an_agent_of_the_openai_agents_sdk(tmp_path: Path) -> None:
    assert PYTHON.exists(), "run `make setup-agents`"
    project = make_project(tmp_path / "project")
    program = project.folder / "infra" / "examples" / "agents" / "with_openai_agents.py"
    project.set_params(
        {
            "environment.name": "agent",
            "environment.settings": {
                "command": [str(PYTHON), str(program)],
                "object": None,
                "environment": {},
                "models": ["policy"],
                "deadline_seconds": 300,
                "world": {"name": "travel_desk", "settings": None},
                "verdict": None,
            },
            "engine.max_concurrent_episodes": 8,
            "curate.source": "tasks/environments/agent",
            "curate.max_select_problems": 40,
            "curate.max_test_problems": 60,
            "assess.num_problems": 10,
            "train.num_iterations": NUM_ITERATIONS,
            "train.snapshot_interval": NUM_ITERATIONS,
            "train.problems_per_iteration": 6,
            "train.group_size": 6,
        }
    )
    for stage in ("curate", "assess", "warm_start", "train", "evaluate"):
        done = project.run("tasks", stage, timeout=3600)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (project.artifacts / "train" / "metrics.jsonl").read_text().splitlines()]
    rates = [row["success_rate"] for row in rows]
    test = project.evaluation()["test"]
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / "agent_learns.json").write_text(json.dumps({"training": rates, "test": test}, indent=1))
    print("in training", [round(rate, 2) for rate in rates])
    for name in ("base", "warm_start", "best"):
        found = test[name]
        print(f"{name}: {found['success_rate']:.1%} ({found['ci_low']:.1%} to {found['ci_high']:.1%})")
    assert test["best"]["success_rate"] > test["warm_start"]["success_rate"]
