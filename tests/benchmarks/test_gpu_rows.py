"""What of `make bench-gpu` can be known without a GPU: which rows fail, and that each asks for what exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.settings import load
from tasks.planning import shapes
from tasks.stages.train.settings import TrainSections
from tests import tiny
from tests.benchmarks import gpu
from tests.benchmarks.at_size import Variant, build_folder, variant_params
from tests.benchmarks.demo import demo_params
from tests.benchmarks.gpu import CHECKS, ITERATIONS, has_failed, one_long_turn, run_check, train_step


@pytest.mark.parametrize(
    ("row", "is_failed"),
    [
        ({"failed": "OutOfMemoryError: 80 GB"}, True),
        ({"status": 1, "told": ["a check did not pass"]}, True),
        ({"status": 0, "told": []}, False),
        ({"is_resumed": False, "memory_ratio": 1.0}, True),
        ({"is_resumed": True, "memory_ratio": 9.0}, False),  # a goal that is missed is a figure
        ({"mfu": 0.01, "goal_mfu": 0.5}, False),
        ({"left_out": "needs two GPUs, found 1"}, False),
    ],
)
def test_a_row_fails_where_it_was_not_measured_or_its_own_check_did_not_hold(
    row: dict[str, Any], is_failed: bool
) -> None:
    assert has_failed(row) is is_failed


def test_a_row_that_raises_is_a_failed_row_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    def out_of_memory() -> dict[str, Any]:
        raise RuntimeError("no memory")

    row = run_check(out_of_memory)
    assert row == {"failed": "RuntimeError: no memory"} and has_failed(row)
    assert "no memory" in capsys.readouterr().err


@pytest.mark.slow
def test_the_update_is_a_row_of_its_own_process_which_gives_the_gpus_memory_back() -> None:
    assert "no CUDA GPU" in train_step()["left_out"]


@pytest.mark.parametrize("name", ITERATIONS)
def test_a_row_of_an_iteration_is_a_run_that_the_settings_accept(name: str) -> None:
    assert name in CHECKS
    variant = Variant(dtype="bfloat16", device="cuda", num_threads=8, **ITERATIONS[name])
    settings = load(TrainSections, variant_params(variant))
    assert settings.engine.name == ("vllm" if "vLLM" in name else "transformers")
    assert settings.compute.offload == ("optimizer" if "offloaded" in name else "none")
    assert (settings.train.lora is not None) == ("LoRA" in name)


def test_without_a_gpu_it_says_so_and_claims_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An exit status other than 0 would be a SystemExit."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(gpu, "CHECKS", {"a row": lambda: pytest.fail("was run")})
    monkeypatch.setattr(gpu, "FILE", tmp_path / "gpu.json")
    gpu.main()
    out = capsys.readouterr().out
    assert out.startswith("no GPU") and "nothing is claimed" in out and len(out.splitlines()) == 1
    assert not (tmp_path / "gpu.json").exists()


def test_the_frozen_base_of_lora_has_no_gradient_of_its_weights() -> None:
    """Per weight: forward, the input's gradient, the reference's forward; in full its own gradient too."""
    assert gpu.operations_of_a_weight(has_lora=False) == 2 + 2 + 2 + 2
    assert gpu.operations_of_a_weight(has_lora=True) == 2 + 2 + 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_at_size_both_trainers_sample_and_train_the_same_number_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, of 5,000 words and two layers: 2 problems × 8 episodes × 24 tokens."""
    pytest.importorskip("trl")
    from tests.benchmarks import trl_step

    monkeypatch.setitem(shapes.KNOWN, "small", ("qwen2", 2, 64, 128, 4, 2, 16, 5000, True))
    monkeypatch.setattr(gpu, "TRL_TOKENS", 24)
    build_folder(tmp_path, Variant("small", "float32", has_lora=False))
    params = one_long_turn(demo_params(), device="cpu")
    params["sampling"]["max_tokens_per_episode"] = 400  # 24 tokens leave no room for the prompt
    found = trl_step.measure_large(tmp_path, tiny.problems(32), params, num_threads=2, rounds=1, their_rows=8)
    assert found["trl"]["sampled_tokens"] == found["turnwise"]["sampled_tokens"] == 2 * 8 * 24
    assert found["trl_step_ratio"] > 0
