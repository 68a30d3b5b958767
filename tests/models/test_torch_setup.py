"""A device or a dtype that is not there is refused before anything is loaded; what a record says of the device."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.chat.format import ChatFormat
from tasks.core.settings import read_params
from tasks.models import folders, torch_setup
from tasks.models.differences import tolerance_of
from tasks.models.folders import load_model
from tasks.models.settings import ComputeSettings, on_cpu
from tasks.models.torch_setup import HEAP_GROWTH, device_name, find_device, prepare_torch, prepared_for, product_dtype
from tasks.pipeline.order import check_machine
from tasks.tools import frozen
from tests import tiny

CARD = "NVIDIA T4"
ROOT = Path(__file__).parents[2]


def compute(**values: Any) -> ComputeSettings:
    return on_cpu(1).model_copy(update=values)


@pytest.fixture
def old_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that emulates bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: CARD)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)


@pytest.fixture
def precisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    yield asked
    torch.use_deterministic_algorithms(True, warn_only=True)


def test_cuda_without_a_card_is_refused_and_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"compute\.device.*cpu or auto"):
        find_device(compute(device="cuda"))
    assert find_device(compute(device="auto")).type == "cpu"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_whose_driver_is_too_old_is_never_left_idle_without_a_word(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    torch_setup._fault_of_cuda.cache_clear()
    with pytest.raises(ValueError, match=r"cannot use the GPU that is here: .*12020.*Update NVIDIA's driver"):
        find_device(compute(device=device))
    assert find_device(compute(device="cpu")).type == "cpu"
    torch_setup._fault_of_cuda.cache_clear()


def test_a_flow_for_a_card_that_is_not_there_says_so_and_not_that_the_model_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    params = read_params(ROOT / "infra" / "profiles" / "demo.yaml")
    params["compute"]["device"] = "cuda"
    with pytest.raises(ValueError, match=r"compute\.device is cuda.*no CUDA device"):
        check_machine(params)


def test_float32_products_with_short_factors_are_as_exact_as_those_of_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert (product_dtype(cpu), product_dtype(cuda)) == ("float32", "float32")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert (product_dtype(cpu), product_dtype(cuda)) == ("float32", "float16")
    assert tolerance_of("float32", product_dtype(cuda)).mean == 0.0125


@pytest.mark.usefixtures("old_card")
@pytest.mark.parametrize("key", ["weights", "frozen"])
def test_a_dtype_the_card_only_emulates_is_refused_with_the_card_and_the_key(key: str) -> None:
    with pytest.raises(ValueError, match=rf"compute\.{key}: bfloat16.*{CARD}.*float32") as error:
        find_device(compute(device="cuda", **{key: "bfloat16"}))
    assert "\n" not in str(error.value)
    assert find_device(compute(device="cpu", **{key: "bfloat16"})).type == "cpu"


@pytest.mark.usefixtures("old_card")
def test_the_refusal_comes_before_any_file_of_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(folders, "weights_hash", lambda folder: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="bfloat16"):
        load_model(tmp_path, compute=compute(device="auto", weights="bfloat16"))


@pytest.mark.usefixtures("old_card")
def test_tf32_is_as_told_on_cuda_and_nothing_is_set_on_a_cpu(precisions: list[str]) -> None:
    for tf32 in (True, False):
        prepare_torch(compute(device="cuda", tf32=tf32))
    assert not torch.are_deterministic_algorithms_enabled()
    prepare_torch(compute(tf32=True))
    assert precisions == ["high", "highest"]


@pytest.mark.usefixtures("old_card")
def test_a_frozen_model_in_process_computes_as_the_run_does(
    monkeypatch: pytest.MonkeyPatch, precisions: list[str], tmp_path: Path
) -> None:
    """TensorFloat-32 stays on, and a run on the CPU of a machine with a GPU stays there."""

    def load(folder: Path, *, compute: ComputeSettings, dtype: str) -> torch.nn.Module:
        prepare_torch(compute)
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(frozen, "stored_dtype", lambda folder: torch.float32)
    monkeypatch.setattr(frozen, "load_model", load)
    monkeypatch.setattr(frozen, "load_chat", lambda folder: ChatFormat(tiny.tokenizer(), source="test"))
    for settings in (compute(device="cuda", tf32=True), compute(device="cpu")):
        prepare_torch(settings)
        found = frozen.FrozenModel(tmp_path, temperature=0.0, setting="environment.user.model")
        assert found._model is not None and prepared_for() == settings
    assert torch.are_deterministic_algorithms_enabled() and precisions == ["high", "high"]


@pytest.mark.usefixtures("old_card")
def test_a_record_names_the_gpu_or_the_processors_architecture() -> None:
    assert device_name(compute(device="auto")) == CARD
    assert device_name(compute(device="cpu")) == f"cpu, {platform.machine()}"


LATER = """
import sys
from tasks.models.torch_setup import leave_out_sklearn

leave_out_sklearn()
from transformers import AutoTokenizer, PreTrainedModel
assert "transformers.generation.candidate_generator" in sys.modules and "sklearn" not in sys.modules
from transformers.loss import loss_for_object_detection
from transformers.utils import is_scipy_available, is_sklearn_available
assert is_scipy_available() and is_sklearn_available() and loss_for_object_detection.linear_sum_assignment
"""


@pytest.mark.slow
def test_what_is_imported_after_a_model_finds_sklearn_and_scipy() -> None:
    """A user's judge may compute a loss of object detection."""
    subprocess.run([sys.executable, "-c", LATER], cwd=ROOT, check=True)


FRAGMENTING = """
import sys, torch
from tasks.models.settings import on_cpu
from tasks.models.torch_setup import prepare_torch, resident_bytes

prepare_torch(on_cpu(1))
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
assert "transformers.generation.candidate_generator" in sys.modules
assert "sklearn" not in sys.modules
before, peak, kept = resident_bytes(), 0, []
for number in range(100):
    block = torch.ones(5_000_000 + 50_000 * number)  # 20 MB and more
    kept.append([torch.ones(8) for _ in range(200)])
    del block
    peak = max(peak, resident_bytes() - before)
print(peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_blocks_that_are_freed_and_never_fit_again_do_not_pile_up() -> None:
    """One block at a time is in use; small tensors between them keep their gaps apart."""
    done = subprocess.run([sys.executable, "-c", FRAGMENTING], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert int(done.stdout) < 3 * HEAP_GROWTH  # 0.6 GB, and 3 GB without the thread
