"""The stages with vLLM in process: the base measured, the policy trained, and a snapshot as good as with our engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.environments.travel_desk import TravelDesk
from tasks.measurement.statistics import Result, summarise
from tasks.problems import read_split
from tasks.rollouts.collect import sample_episodes
from tasks.rollouts.options import EngineSettings, SamplingSettings
from tasks.settings import Paths
from tests import tiny
from tests.engines import vllm_settings
from tests.pipeline.project import Project, make_project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Curated, assessed, warmed up and trained for two iterations; `assess` and `train` with vLLM."""
    folder = tmp_path_factory.mktemp("vllm-flow")
    project = make_project(folder / "project")
    project.set_params(
        {
            **{f"model.embedded.{name}": value for name, value in tiny.HEADS_FOR_VLLM.items()},
            "engine.name": "vllm",
            "engine.vllm": vllm_settings(folder / "weights").model_dump(mode="json"),
            "sampling.temperature": 1.2,
            "train.num_iterations": 2,
            "train.snapshot_interval": 2,
        }
    )
    for stage in ("curate", "assess", "warm_start", "train"):
        done = project.run("tasks", stage)
        assert done.returncode == 0, f"{stage}: {done.stdout}\n{done.stderr}"
    yield project
    assert not [process for process in project.processes() if "VLLM" in process.name()]


def rows(project: Project) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.artifacts / "train" / "metrics.jsonl").read_text().splitlines()]


def test_each_iteration_says_what_the_refresh_cost_and_how_the_prefix_cache_did(project: Project) -> None:
    assert [row["iteration"] for row in rows(project)] == [1, 2]
    for row in rows(project):
        assert 0 < row["refresh_seconds"] + row["probe_seconds"] < 60
        assert row["prefix_cache_hit_rate"] > 0.1  # of prompts of 10 to 100 tokens, in whole blocks of 32
        assert row["engine_restarts"] == 0


def test_the_trainer_finds_the_log_probs_it_was_told(project: Project) -> None:
    """Exact to float32, over every token of both iterations."""
    assert all(row["mismatch_max"] < 1e-3 for row in rows(project))


def test_both_engines_find_the_same_success_in_one_snapshot(project: Project) -> None:
    """120 episodes each: the intervals of two rates that are one and the same overlap."""
    params = project.params()
    engines = {
        "vllm": EngineSettings.model_validate(params["engine"]),
        "transformers": EngineSettings.model_validate({**params["engine"], "name": "transformers", "vllm": None}),
    }
    found = {name: success(project, engine) for name, engine in engines.items()}
    vllm, transformers = found["vllm"], found["transformers"]
    assert vllm["ci_low"] <= transformers["ci_high"] and transformers["ci_low"] <= vllm["ci_high"], found
    assert all(result["success_rate"] > 0.1 for result in found.values()), found


def success(project: Project, engine: EngineSettings) -> Result:
    played = sample_episodes(
        Path(project.artifacts / "train" / "snapshots" / "step-0002"),
        TravelDesk(),
        read_split(Paths(artifacts=project.artifacts), "select"),
        engine=engine,
        sampling=SamplingSettings(**project.params()["sampling"]),
        seed=1,
        stage="select",
        samples_per_problem=2,
        num_threads=1,
        label="select",
    )
    return summarise(played, confidence=0.99)
