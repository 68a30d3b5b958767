"""The whole flow of a mixture with vLLM, and another environment beside it that training never sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.engine_benches import vllm_settings
from tests.pipeline.project import make_project
from tests.pipeline.shops import mixed_with_desk, open_shops

pytestmark = pytest.mark.bench  # three starts of vLLM and a flow: three minutes


def test_vllm_plays_a_mixture_and_another_environment_as_it_plays_one(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    open_shops(project)
    project.set_params(
        {
            **{f"model.embedded.{name}": value for name, value in tiny.HEADS_FOR_VLLM.items()},
            "engine.name": "vllm",
            "engine.settings": vllm_settings(tmp_path / "weights").model_dump(mode="json"),
            **mixed_with_desk(also=20),
            "train.num_iterations": 2,
            "train.snapshot_interval": 1,
        }
    )
    project.flow()
    metrics = [json.loads(line) for line in (project.artifacts / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [row["engine_restarts"] for row in metrics] == [0, 0]
    assert all(row["mismatch_max"] < 1e-3 for row in metrics)
    assert set(metrics[-1]["success_by_environment"]) == {"travel_desk", "custom"}
    results = project.evaluation()["also"]["custom-Kiosk"]["results"]
    assert {name: result["num_problems"] for name, result in results.items()} == {
        "base": 20, "warm_start": 20, "best": 20
    }  # fmt: skip
    print(json.dumps({"iterations": metrics, "also": results}, indent=1))
