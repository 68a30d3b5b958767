"""Weights by CUDA IPC, which needs a GPU: vLLM's own sender runs here, over host memory in the place of the GPU's."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.chat.format import load_chat
from tasks.engines.vllm import ipc
from tasks.engines.vllm.core_process import VLLMCore
from tasks.engines.vllm.in_process import VLLMEngine
from tasks.engines.vllm.ipc import buffer_bytes, send_by_ipc
from tasks.engines.vllm.nccl import copies
from tasks.engines.vllm.served_tensors import Described, served_tensors
from tasks.engines.vllm.shared import Start
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import on_cpu
from tests import tiny
from tests.engine_benches import engine_settings, vllm_settings

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
SMALL_BUFFER = 8192  # bytes; the tiny model's embedding has more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def weights(folder: Path) -> PolicyWeights:
    """Of a model that says it is on a GPU."""
    model = load_model(folder, compute=on_cpu(1))
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0), _weight_conversions=[])
    return PolicyWeights(on_gpu, PolicyWeights.of(model).tensors)


class HostMemoryTorch:
    """torch, but what vLLM's sender makes on the GPU is in host memory; `buffers` has what it made."""

    def __init__(self) -> None:
        stream = SimpleNamespace(synchronize=lambda: None)
        self.buffers: list[torch.Tensor] = []
        self.accelerator = SimpleNamespace(current_device_index=lambda: 0)
        self.cuda = SimpleNamespace(
            get_device_properties=lambda index: SimpleNamespace(uuid="GPU"),
            current_stream=lambda: stream,
            ipc_collect=lambda: None,
        )

    def empty(self, size: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        self.buffers.append(torch.empty(size, dtype=dtype))
        return self.buffers[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Worker:
    """vLLM's side: it reads each chunk from the shared buffer with vLLM's own functions, and notes who calls what."""

    def __init__(self, gpu: HostMemoryTorch):
        self.gpu, self.tensors, self.calls = gpu, {}, []  # type: ignore[var-annotated]

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

        info = request["update_info"]
        assert pickle.loads(base64.b64decode(info["ipc_handles_pickled"])) == {"GPU": ("handle",)}
        content = self.gpu.buffers[-1][: sum(info["tensor_sizes"])].clone()
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        self.tensors |= dict(unpack_tensor(content, info["names"], info["shapes"], dtypes, info["tensor_sizes"]))
        self.calls.append("update")

    def finish_weight_update(self, version: str | None) -> None:
        self.calls.append("finish")

    def update_weight_version(self, name: str) -> None:
        self.calls.append(f"label {name}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

    gpu = HostMemoryTorch()
    worker = Worker(gpu)
    for module in (ipc_engine, packed_tensor):
        monkeypatch.setattr(module, "torch", gpu)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda buffer: (None, ("handle",)))
    monkeypatch.setattr(ipc, "BUFFER_BYTES", SMALL_BUFFER)
    monkeypatch.setattr(ipc, "free_unused", lambda device: worker.calls.append(f"free {device.type}"))
    return worker


def test_a_tensor_larger_than_the_buffer_arrives_and_so_does_the_tied_head(
    worker: Worker, weights: PolicyWeights
) -> None:
    """The buffer has the size of the largest tensor, and its memory is given back when vLLM has read the last chunk."""
    llm: Any = worker
    send_by_ipc(llm, weights, torch.bfloat16)
    expected = dict(served_tensors(weights, torch.bfloat16))
    assert worker.tensors.keys() == expected.keys() and "lm_head.weight" in expected
    assert all(torch.equal(worker.tensors[name], tensor) for name, tensor in expected.items())
    largest = max(tensor.nbytes for tensor in expected.values())
    assert [len(buffer) for buffer in worker.gpu.buffers] == [largest] and largest > SMALL_BUFFER
    assert worker.calls[:2] == ["init", "start"] and worker.calls[-2:] == ["finish", "free cuda"]
    assert worker.calls.count("update") > 2


def test_the_buffer_of_a_large_vocabulary_has_room_for_its_embedding() -> None:
    """152,064 words × 3,584 in bfloat16 are 1.09 GB, more than vLLM's own 1 GiB; a small model's buffer stays small."""
    embedding = Described("embed", torch.bfloat16, (152_064, 3584))
    assert buffer_bytes([embedding, Described("norm", torch.bfloat16, (3584,))]) == 152_064 * 3584 * 2 > 1 << 30
    assert buffer_bytes([Described("norm", torch.bfloat16, (3584,))]) == ipc.BUFFER_BYTES


def test_vllm_wakes_its_kv_cache_when_the_buffer_is_given_back(
    worker: Worker, weights: PolicyWeights, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import nullcontext

    watch: Any = SimpleNamespace(awaited=nullcontext)
    llm: Any = worker
    core = VLLMCore(llm, watch, tmp_path / "no sockets")
    monkeypatch.setattr(VLLMEngine, "_start", lambda self: core)
    settings = engine_settings("vllm", vllm_settings(tmp_path / "weights", transfer="ipc"))
    engine = VLLMEngine(Start(folder, load_chat(folder), tiny.SAMPLING, settings, None))
    engine.is_asleep = True
    worker.calls.clear()
    engine.refresh(weights, 1)
    told = [call for call in worker.calls if call != "update"]
    assert told == [
        "wake weights", "label half applied", "init", "start", "finish", "free cuda", "wake kv_cache", "label 1",
    ]  # fmt: skip


def test_by_nccl_weights_that_wait_in_host_memory_go_to_the_trainers_device_one_by_one(
    weights: PolicyWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `train.max_staleness` they are a copy in host memory. torch's device without numbers stands for the GPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    elsewhere: Any = SimpleNamespace(device=torch.device("meta"), _weight_conversions=[])
    waiting = dict(weights.tensors())
    assert {tensor.device.type for tensor in waiting.values()} == {"cpu"}
    sent = copies(PolicyWeights(elsewhere, lambda: iter(waiting.items())), torch.bfloat16)
    assert sent.keys() == waiting.keys()
    assert {(tensor.device.type, tensor.dtype) for tensor in sent.values()} == {("meta", torch.bfloat16)}
