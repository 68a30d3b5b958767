"""One vLLM server as a child process: started on its own socket, waited for, always stopped.

It runs the server's module: the `vllm` command fails with the CPU build, whose distribution has another name. Whoever
reaches the routes for new weights can swap the policy or overwrite a file, so the server listens on no port (open to
every user and web page) but on a Unix socket in a folder for this user alone, as its engine core does. The last lines
of its log are in the error when it does not start. `core/child_processes.py` ends it with this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tasks.core.child_processes import ChildProcess
from tasks.engines.vllm import shared as vllm_shared
from tasks.engines.vllm.settings import VLLMSettings
from tasks.models.policy_weights import AdapterShape

MODEL_NAME = "policy"
LOOK_AGAIN_SECONDS = 0.25
LAST_LINES = 3
GRACE_SECONDS = 5.0  # for an orderly shutdown that frees shared memory


class ServerDown(Exception):
    """A server that does not run or does not answer correctly; the message says what was seen."""


class ServerProcess(ChildProcess):
    """`number` counts this process's servers; `max_model_len` is in tokens, `max_num_seqs` in episodes."""

    def __init__(
        self,
        folder: Path,
        settings: VLLMSettings,
        *,
        number: int,
        max_model_len: int,
        max_num_seqs: int,
        log_folder: Path,
        lora: AdapterShape | None,
    ):
        sockets = vllm_shared.private_folder()
        self.settings, self.socket = settings, sockets / "server"
        self.url = f"unix:{self.socket}"
        command = serve_command(
            folder,
            settings,
            socket=self.socket,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            on_gpu=num_gpus() > 0,
            lora=lora,
        )
        variables = server_environment(settings, number=number, num_gpus=num_gpus())
        if lora is not None:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        log_folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            command,
            env=variables | vllm_shared.private_sockets(sockets),
            log=log_folder / f"server-{number}.log",
            folder=sockets,
            grace_seconds=GRACE_SECONDS,
        )

    async def wait_ready(self) -> float:
        """The seconds until it answered. ServerDown where it ends first or takes too long."""
        start = time.monotonic()
        while not await self.is_healthy():
            if not self.is_alive():
                raise ServerDown(f"it ended while it was starting; {self.last_words()}")
            if time.monotonic() - start > self.settings.start_timeout_seconds:
                raise ServerDown(
                    f"it was not up within engine.settings.start_timeout_seconds "
                    f"({self.settings.start_timeout_seconds:g} s); {self.last_words()}"
                )
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        return time.monotonic() - start

    async def is_healthy(self) -> bool:
        return await _is_healthy(self.socket)

    async def ending(self) -> str:
        """Its last words; "" while it runs."""
        return "" if self.is_alive() else self.last_words()

    def last_words(self) -> str:
        quoted = " | ".join(self.last_lines(LAST_LINES, preferred="Error"))
        return f"{self.log} ends: {quoted}" if quoted else f"{self.log} is empty"


def serve_command(
    folder: Path,
    settings: VLLMSettings,
    *,
    socket: Path,
    max_model_len: int,
    max_num_seqs: int,
    on_gpu: bool,
    lora: AdapterShape | None = None,
) -> list[str]:
    """Log-probs are of the distribution sampled from; only requests set the sampling."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--served-model-name", MODEL_NAME),
        *("--uds", str(socket)),
        *("--load-format", "safetensors"),  # never a pickle; the model author's code stays off, as by default
        *("--dtype", settings.dtype, "--max-model-len", str(max_model_len)),
        *("--max-num-seqs", str(max_num_seqs)),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    ]
    if settings.enforce_eager:
        command.append("--enforce-eager")
    if settings.transfer == "nccl":
        command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    for name, value in vllm_shared.lora_arguments(lora, folder).items():
        command += [f"--{name.replace('_', '-')}", *_words(value)]
    if on_gpu:
        return [*command, "--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    step = str(vllm_shared.whole_prompts(max_model_len))
    return [
        *command,
        *("--block-size", str(vllm_shared.BLOCK_TOKENS)),
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", step),
        *("--distributed-executor-backend", vllm_shared.cpu_executor(settings.tensor_parallel_size)),
    ]


def _words(value: Any) -> list[str]:
    return [] if value is True else value if isinstance(value, list) else [str(value)]


def server_environment(settings: VLLMSettings, *, number: int, num_gpus: int) -> dict[str, str]:
    """GPUs are assigned from the last one down, since training uses the first."""
    chosen = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    if num_gpus:
        last = num_gpus - (number - 1) * settings.tensor_parallel_size
        first = last - settings.tensor_parallel_size
        if first < 0:
            raise ValueError(
                f"engine.settings asks for {settings.num_servers} servers of {settings.tensor_parallel_size} GPUs and "
                f"this machine has {num_gpus}, so server {number} would have none. Lower num_servers or "
                f"tensor_parallel_size."
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(device) for device in range(num_gpus)]
        return os.environ | chosen | {"CUDA_VISIBLE_DEVICES": ",".join(devices[first:last])}
    # Without GPU: two servers that bind threads would bind the same cores.
    cpu = {
        **vllm_shared.CPU_ENVIRONMENT,
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // settings.num_servers)),
    }
    return os.environ | chosen | cpu


async def _is_healthy(socket: Path) -> bool:
    """Whether GET /health answers 200 within a second: it may hang while the server starts."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
