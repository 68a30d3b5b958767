"""Weights from the trainer's GPU to those of one vLLM server by NCCL, with vLLM's own trainer-side sender.

Each server has its own group with the trainer as rank 0, so a dying server takes no other with it. A copy is sent,
which costs one more model of the engine's dtype in GPU memory: a late server loads it while the trainer changes its
weights. Where several ranks train, rank 0 has gathered the policy in host memory: the copy is there, and goes to rank
0's GPU a tensor at a time. Written from vLLM 0.32's sources and tested against its classes and routes. While a group
meets and sends, its ports accept anybody (NCCL has no secrets), so the network must be private.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tasks.core.background import run
from tasks.core.text import one_line
from tasks.engines.vllm.client import VLLMClient
from tasks.engines.vllm.ipc import weight_source
from tasks.engines.vllm.served_tensors import Described, served_tensors
from tasks.engines.vllm.server_process import ServerDown
from tasks.engines.vllm.settings import UNIX
from tasks.models.policy_weights import PolicyWeights

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from vllm.distributed.weight_transfer.base import WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

LOOPBACK = "127.0.0.1"


class NCCLSender:
    def __init__(self, client: VLLMClient):
        self.client = client
        self.engine: NCCLTrainerWeightTransferEngine | None = None

    async def send(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Have the server load `tensors` from `device`. ServerDown where they do not arrive whole; the group is closed
        then.
        """
        seconds = self.client.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                num_workers = await self.client.num_workers()
                await asyncio.to_thread(self._send, tensors, device, num_workers)
        except TimeoutError:
            self.close()
            raise ServerDown(
                f"it took no weights by NCCL within {seconds:g} s (engine.settings.request_timeout_seconds)"
            ) from None
        except RuntimeError as error:  # what NCCL and its rendezvous raise
            self.close()
            raise ServerDown(f"it took no weights by NCCL ({one_line(error)})") from None

    def close(self) -> None:
        """Also ends a broadcast that waits for a dead server."""
        if self.engine is not None:
            self.engine.shutdown()
        self.engine = None

    def _send(self, tensors: dict[str, Tensor], device: torch.device, num_workers: int) -> None:
        import torch
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        with torch.cuda.device(device):  # a thread begins on the first GPU
            source = source_of(tensors, device)
            if self.engine is None:
                group = trainer_group(self.client.url, num_workers)
                self.engine = NCCLTrainerWeightTransferEngine.trainer_init(
                    group, client=Routes(self.client), source=source
                )
            self.engine.source = source
            self.engine.send_weights()


def source_of(tensors: dict[str, Tensor], device: torch.device) -> WeightSource:
    """Each on `device` when it is its turn."""
    described = [Described(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return weight_source(lambda: ((name, tensor.to(device)) for name, tensor in tensors.items()), described)


class Routes:
    """vLLM's weight-transfer protocol over VLLMClient. It blocks: call it in its own thread, never on the event
    loop.
    """

    def __init__(self, client: VLLMClient):
        self.client = client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Without the label: it comes last, when the prefix cache is empty too."""
        self._post("/finish_weight_update", {"weight_version": weight_version} if weight_version else {})

    def _post(self, route: str, body: dict[str, Any]) -> None:
        run(self.client.post(route, body)).result()


def trainer_group(url: str, num_workers: int) -> NCCLTrainerInitInfo:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        rank=0, master_address=own_address(url), master_port=free_port(), world_size=1 + num_workers
    )


def own_address(url: str) -> str:
    if url.startswith(UNIX):
        return LOOPBACK
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # UDP: picks a route, sends nothing
        probe.connect((parts.hostname or LOOPBACK, parts.port or 80))
        return str(probe.getsockname()[0])


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as held:
        return int(held.getsockname()[1])


def copies(weights: PolicyWeights, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The current weights in the engine's dtype, copied where the model is: in GPU memory, one after another where they
    wait in host memory (`train.max_staleness`), or in host memory where several ranks train. ValueError where the
    trainer has no GPU.
    """
    import torch

    device = sends_from(weights)
    if device.type == "cpu":
        raise ValueError(
            f"engine.settings.transfer is nccl and the policy is on {device}, so there is no GPU memory to send from. "
            f"Set engine.settings.transfer: disk."
        )
    tensors = dict(served_tensors(weights, dtype, copy_to=weights.model.device))
    torch.cuda.synchronize(device)  # they are read on another thread's stream
    return tensors


def sends_from(weights: PolicyWeights) -> torch.device:
    return weights.device or weights.model.device
