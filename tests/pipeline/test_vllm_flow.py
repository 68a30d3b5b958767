"""The whole flow with vLLM: every stage plays with it, and a snapshot is as good as with the engine in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tasks.core.files import read_json, read_jsonl
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.measurement.statistics import paired_difference, summarise
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import sample_episodes
from tasks.rollouts.settings import EngineSettings, PlaySettings, SamplingSettings
from tests import tiny
from tests.engine_benches import vllm_settings
from tests.pipeline.project import Project, make_project

pytestmark = pytest.mark.bench  # three starts of vLLM and a flow: two and a half minutes


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A finished flow of two iterations, each with a snapshot, so that `evaluate` refreshes the vLLM it started."""
    folder = tmp_path_factory.mktemp("vllm-flow")
    project = make_project(folder / "project")
    project.set_params(
        {
            **{f"model.embedded.{name}": value for name, value in tiny.HEADS_FOR_VLLM.items()},
            "engine.name": "vllm",
            "engine.settings": vllm_settings(folder / "weights").model_dump(mode="json"),
            "sampling.temperature": 1.2,
            "train.num_iterations": 2,
            "train.snapshot_interval": 1,
        }
    )
    project.flow()
    yield project
    assert not [process for process in project.processes() if "VLLM" in process.name()]


def rows(project: Project) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.artifacts / "train" / "metrics.jsonl").read_text().splitlines()]


def test_each_iteration_says_what_the_refresh_cost_and_how_the_prefix_cache_did(project: Project) -> None:
    assert [row["iteration"] for row in rows(project)] == [1, 2]
    timings = (project.artifacts / "timings" / "train.jsonl").read_text().splitlines()
    assert all(0 < row["refresh_seconds"] + row["probe_seconds"] < 60 for row in map(json.loads, timings))
    for row in rows(project):
        assert row["prefix_cache_hit_rate"] > 0.1  # of prompts of 10 to 100 tokens, in whole blocks of 32
        assert row["engine_restarts"] == 0


def test_the_trainer_finds_the_log_probs_it_was_told(project: Project) -> None:
    """Exact to float32, over every token of both iterations."""
    assert all(row["mismatch_max"] < 1e-3 for row in rows(project))


def test_both_engines_find_the_same_success_in_one_snapshot(project: Project) -> None:
    """On test, with the same problems and seeds: the 99% interval of the paired difference holds 0."""
    params = project.params()
    name = read_json(project.artifacts / "evaluate" / "evaluation.json")["best_snapshot"]
    stored = read_jsonl(project.artifacts / "evaluate" / "trajectories" / "test_best.jsonl")
    by_vllm = [Trajectory.from_row(row) for _, row in stored]
    in_process = sample_episodes(
        project.artifacts / "train" / "snapshots" / name,
        TravelDesk(),
        read_split(Paths(artifacts=project.artifacts), "test"),
        PlaySettings(
            engine=EngineSettings.model_validate({**params["engine"], "name": "transformers", "settings": None}),
            sampling=SamplingSettings(**params["sampling"]),
            seed=params["seed"],
            samples_per_problem=params["evaluate"]["test_samples_per_problem"],
            compute=on_cpu(1),
        ),
        stage="test",
        label="test",
    )
    difference = paired_difference(by_vllm, in_process, confidence=0.99)
    assert difference["ci_low"] <= 0 <= difference["ci_high"], difference
    assert summarise(by_vllm, confidence=0.99)["success_rate"] > 0.1
