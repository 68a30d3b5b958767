"""vLLM beside a trainer on a real GPU: does it get memory, give it back, and compute with the weights it was sent?

`python -m tests.benchmarks.gpu_vllm MODEL_FOLDER` prints a row per check and exits with 1 if one failed. Without a GPU
it says so and checks what a CPU has: weights by disk, and adapters. With one GPU it leaves NCCL out, which needs two.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tasks.chat.format import load_chat
from tasks.learning.shared.lora import POLICY, Adapter
from tasks.models.architecture import model_logp
from tasks.models.differences import Differences, Tolerance, tolerance_of
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import ComputeSettings, LoRASettings, on_cpu
from tasks.models.torch_setup import find_device, product_dtype
from tasks.rollouts.engine import Engine
from tasks.rollouts.load import load_engine
from tasks.rollouts.probe import compare_logp
from tests import tiny
from tests.engine_benches import engine_settings, vllm_settings

GIB = 1 << 30
SHARE = 0.4  # of the GPU's memory
MUST_FREE = 0.8  # of what vLLM took, when it sleeps
LORA = LoRASettings(rank=16, alpha=32, target_modules="all-linear")
SAMPLING = tiny.SAMPLING.model_copy(update={"max_tokens_per_episode": 512})
Row = dict[str, Any]
Change = Callable[[], PolicyWeights]


@dataclass(frozen=True)
class Ground:
    """The device, the dtype of trainer and engine, and what vLLM is started with."""

    compute: ComputeSettings
    dtype: str

    @classmethod
    def of_this_machine(cls) -> Ground:
        if not torch.cuda.is_available():
            return cls(on_cpu(torch.get_num_threads()), "float32")
        on_gpu = {"device": "cuda", "weights": "bfloat16", "frozen": "bfloat16"}
        return cls(on_cpu(torch.get_num_threads()).model_copy(update=on_gpu), "bfloat16")

    @property
    def tolerance(self) -> Tolerance:
        """The engine's own, of a run with `engine.probe_tolerance: auto`."""
        return tolerance_of(self.dtype, product_dtype(find_device(self.compute)))


def check_sleep_wake(model_folder: Path) -> list[Row]:
    """Weights by disk, asleep before each: vLLM gives back its memory, and what it wakes to is the new policy."""
    return _check(model_folder, "weights by disk", transfer="disk")


def check_adapter(model_folder: Path) -> list[Row]:
    """A LoRA policy: the weights below it outlast sleep in host memory, and each adapter takes the last one's place."""
    return _check(model_folder, "LoRA adapter", transfer="disk", lora=LORA)


def check_ipc(model_folder: Path) -> list[Row]:
    return _check(model_folder, "weights by IPC", transfer="ipc")


def check_nccl(model_folder: Path) -> list[Row]:
    if torch.cuda.device_count() < 2:
        return [{"check": "weights by NCCL", "left_out": f"needs two GPUs, found {torch.cuda.device_count()}"}]
    rows = _check(model_folder, "weights by NCCL", transfer="nccl", mode="server")
    name = "weights by NCCL from host memory, as of several ranks"
    return rows + _check(model_folder, name, is_in_host_memory=True, transfer="nccl", mode="server")


def _check(
    model_folder: Path,
    name: str,
    *,
    lora: LoRASettings | None = None,
    is_in_host_memory: bool = False,
    **vllm: Any,
) -> list[Row]:
    """Three policies, one after another: a row for the start and one for each."""
    ground = Ground.of_this_machine()
    before = used_gib()
    with tempfile.TemporaryDirectory() as folder, _engine(model_folder, ground, Path(folder), lora, **vllm) as engine:
        rows = [_sleep(engine, name, before)]
        model = load_model(model_folder, compute=ground.compute)
        change = _adapters(model, lora) if lora else _whole_weights(model)
        change = _in_host_memory(change) if is_in_host_memory else change
        for version in (1, 2, 3):
            rows.append(_refresh(engine, name, change(), version, tolerance=ground.tolerance))
            engine.sleep()
    return rows


@contextmanager
def _engine(
    model_folder: Path, ground: Ground, weights: Path, lora: LoRASettings | None, **vllm: Any
) -> Iterator[Engine]:
    options = vllm_settings(weights, dtype=ground.dtype, gpu_memory_utilization=SHARE, **vllm)
    engine = load_engine(
        model_folder,
        load_chat(model_folder),
        engine=engine_settings("vllm", options),
        sampling=SAMPLING,
        compute=ground.compute,
        lora=lora,
    )
    try:
        yield engine
    finally:
        engine.close()


def _sleep(engine: Engine, name: str, before: float) -> Row:
    """Memory of the GPU, over what other programs had."""
    taken = used_gib() - before
    engine.sleep()
    if not getattr(engine, "is_asleep", False):
        return {"check": name, "step": "sleep", "left_out": "servers and engines on a CPU stay awake"}
    kept = used_gib() - before
    is_passed = kept < (1 - MUST_FREE) * taken
    return {"check": name, "step": "sleep", "passed": is_passed, "awake_gib": taken, "asleep_gib": kept}


def _refresh(engine: Engine, name: str, weights: PolicyWeights, version: int, *, tolerance: Tolerance) -> Row:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
    start = time.perf_counter()
    engine.refresh(weights, version)
    seconds = time.perf_counter() - start
    extra = (torch.cuda.max_memory_allocated() - held) / GIB if torch.cuda.is_available() else 0.0
    found = differences(engine, weights.model)
    return {
        "check": name,
        "step": f"policy {version}",
        "passed": found.is_within(tolerance),
        "refresh_seconds": seconds,
        "trainer_extra_gib": extra,
        "mean_nats": found.mean,
        "p99_nats": found.p99,
        "max_nats": found.max,
    }


def differences(engine: Engine, model: PreTrainedModel) -> Differences:
    """Over the same 4 × 200 tokens."""
    generator = torch.Generator().manual_seed(1)
    size = min(1000, model.get_input_embeddings().num_embeddings)
    sequences = torch.randint(10, size, (4, 200), generator=generator).tolist()
    return compare_logp(engine.token_logp(sequences), model_logp(model, sequences)).differences


def _whole_weights(model: PreTrainedModel) -> Change:
    """Each policy is far from the one before: every tensor is larger."""

    @torch.no_grad()
    def change() -> PolicyWeights:
        for parameter in model.parameters():
            parameter.mul_(1.05)
        return PolicyWeights.of(model)

    return change


def _in_host_memory(change: Change) -> Change:
    """As rank 0 of several has them: gathered there, and to be sent from its GPU."""

    def changed() -> PolicyWeights:
        model = change().model
        return replace(PolicyWeights.of(copy.deepcopy(model).to("cpu")), device=model.device)

    return changed


def _adapters(model: PreTrainedModel, lora: LoRASettings) -> Change:
    adapter = Adapter(model, lora, weights="float32")

    @torch.no_grad()
    def change() -> PolicyWeights:
        for tensor in adapter.tensors(POLICY).values():
            tensor.add_(0.02 * torch.randn_like(tensor))
        return adapter.weights(POLICY)

    return change


def used_gib() -> float:
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def main(model_folder: Path) -> int:
    checks = [check_sleep_wake, check_adapter]
    if torch.cuda.is_available():
        checks += [check_ipc, check_nccl]
    else:
        print("There is no GPU: sleep and wake, IPC and NCCL were not checked.")
    rows = [row for check in checks for row in check(model_folder)]
    for row in rows:
        print(
            ", ".join(f"{key} {value:.3g}" if type(value) is float else f"{key} {value}" for key, value in row.items())
        )
    return int(any(row.get("passed") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
