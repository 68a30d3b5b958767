"""A model that does not fit, or that turnwise cannot compute, is refused by every stage that would load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.pipeline import order
from tasks.planning.hardware import GPUS
from tests.models.test_empty_model import CHOOSES_TOKENS
from tests.profiles import profile_params


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `run_stage` reads, for stages that fail the test when they start."""

    class Stage:
        SETTINGS = order.CommonSections

        @staticmethod
        def run(settings: object, paths: object) -> None:
            pytest.fail("the stage started")

    found = profile_params("my_model")
    found["paths"]["artifacts"] = str(tmp_path / "artifacts")
    monkeypatch.setattr(order, "read_params", lambda: found)
    monkeypatch.setattr(order, "check_params", lambda params: None)
    monkeypatch.setattr(order, "prepare_process", lambda params: None)
    monkeypatch.setattr(order, "stage_module", lambda name: Stage)
    return found


@pytest.mark.parametrize("stage", order.LOADS_A_MODEL)
def test_a_model_too_large_for_the_gpu_stops_each_stage_before_it_loads_one(
    stage: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """27 GB while playing, on a card with 25: less than 1.2 times its memory."""
    params["model"]["path"] = "models/Qwen2.5-7B-Instruct"
    monkeypatch.setattr("tasks.planning.setup.this_machine", lambda compute: GPUS["4090-24gb"])
    with pytest.raises(ValueError, match=r"does not fit 4090-24gb .*engine.max_concurrent_episodes: 16"):
        order.run_stage(stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", order.LOADS_A_MODEL)
def test_an_attention_that_turnwise_does_not_compute_stops_each_stage_with_the_engine_in_process_too(
    stage: str, params: dict[str, Any], tmp_path: Path
) -> None:
    """DeepSeek 3.2's is told which tokens to attend to. The folder has no weights that could be loaded."""
    config = {"model_type": "deepseek_v32", **CHOOSES_TOKENS, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    params["model"]["path"] = str(tmp_path)
    assert params["engine"]["name"] == "transformers"
    with pytest.raises(ValueError, match="DeepseekV32Attention asks its attention for indices") as refused:
        order.run_stage(stage)
    assert "\n" not in str(refused.value)
