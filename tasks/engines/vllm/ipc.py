"""Weights from the trainer to vLLM without a folder: which transfer is allowed where, and CUDA IPC on one GPU.

vLLM's own sender walks the tensors in chunks; this module gives it the policy's tensors and calls the engine. Written
from vLLM 0.32's sources. `nccl.py` is for servers on other GPUs.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tasks.engines.vllm.served_tensors import Described, describe_tensors, served_tensors
from tasks.engines.vllm.settings import Mode, Transfer
from tasks.models.policy_weights import PolicyWeights
from tasks.models.torch_setup import free_unused

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from vllm import LLM
    from vllm.distributed.weight_transfer.base import WeightSource

BUFFER_BYTES = (
    512 << 20
)  # of GPU memory shared with vLLM, which copies each filling once more; vLLM's default is twice it
MODE_OF = {"ipc": "in_process", "nccl": "server"}  # IPC needs the trainer's GPU, NCCL another one


def check_transfer(transfer: Transfer, *, mode: Mode, on_gpu: bool) -> None:
    if transfer == "disk":
        return
    if mode != MODE_OF[transfer]:
        raise ValueError(
            f"engine.settings.transfer is {transfer} and engine.settings.mode is {mode}, so new weights would never "
            f"arrive: ipc is for in_process, nccl for server. Set transfer: disk, or the one that fits the mode."
        )
    if not on_gpu:
        raise ValueError(
            f"engine.settings.transfer is {transfer}, which goes from GPU to GPU, and there is none here, so new "
            f"weights would never arrive. Set transfer: disk; a folder in memory such as /dev/shm is fastest."
        )


def transfer_arguments(transfer: Transfer) -> dict[str, Any]:
    """What vLLM must be started with. Its workers unpickle IPC handles only where this is allowed."""
    if transfer == "disk":
        return {}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return {"weight_transfer_config": {"backend": transfer}}


def send_by_ipc(llm: LLM, weights: PolicyWeights, dtype: torch.dtype | None) -> None:
    """Give vLLM's worker handles of copies in GPU memory, chunk by chunk, and wait until it has read them.

    vLLM packs tensors into one buffer, each cast to `dtype` on its way, so nothing else is copied. At the end the
    buffer goes back to the GPU: what vLLM wakes next needs the memory.
    """
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    device = weights.model.device
    if device.type == "cpu":
        raise ValueError(
            f"engine.settings.transfer is ipc and the policy is on {device}, so there is no GPU memory to share. Set "
            f"engine.settings.transfer: disk."
        )
    described = describe_tensors(weights, dtype)
    IPCTrainerWeightTransferEngine.trainer_init(
        IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=buffer_bytes(described)),
        client=_Client(llm),
        source=weight_source(lambda: served_tensors(weights, dtype), described),
    ).send_weights()
    free_unused(device)


def buffer_bytes(described: Sequence[Described]) -> int:
    """Enough for the largest tensor, since vLLM takes each whole: the embedding of 152,000 words at 7B has 1.09 GB."""
    return max([BUFFER_BYTES, *(item.num_bytes for item in described)])


def weight_source(tensors: Callable[[], Iterator[tuple[str, Tensor]]], described: Sequence[Described]) -> WeightSource:
    """The stream that `tensors` begins anew, and what it yields, for vLLM's senders; their own source walks parameters
    and misses a tied head.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Tensors(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(item.name, item.dtype, item.shape) for item in described]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return tensors()

    return Tensors()


class _Client:
    """vLLM's weight-transfer protocol over the offline `LLM`; handles travel pickled, as in vLLM's own HTTP client."""

    def __init__(self, llm: LLM):
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        handles = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()
        plain = {name: value for name, value in update_info.items() if name != "ipc_handles"}
        self.llm.update_weights({"update_info": plain | {"ipc_handles_pickled": handles}})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)
