"""vLLM's engine core, the process its model runs in: started, asked, given weights, and always ended.

Each call that waits for the core is watched: a core that dies or falls silent ends the wait with `core_death()`. A core
survives the kill of its parent; then the guardian ends it (`core/child_processes.py`). `in_process.py` restarts it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from tasks.core.child_processes import own_guardian
from tasks.core.machine import GIB
from tasks.core.text import one_line
from tasks.engines.vllm import shared as vllm_shared
from tasks.engines.vllm.ipc import check_transfer, send_by_ipc, transfer_arguments
from tasks.engines.vllm.settings import VLLMSettings, settings_of
from tasks.models.policy_weights import AdapterShape, PolicyWeights
from tasks.rollouts.settings import EngineSettings, SamplingSettings

if TYPE_CHECKING:
    import torch
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

ADAPTER = "adapter"  # vLLM's name for the policy's LoRA adapter
SleepLevel = Literal[1, 2]
SleepingPart = Literal["weights", "kv_cache"]
TICK_SECONDS = 1.0
# Read by vLLM when it is imported and by the processes it starts.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process whose OpenMP threads have run may hang
}


class NotStarted(ValueError):
    """vLLM did not come up."""


def core_death() -> type[Exception]:
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError


class CoreWatch:
    """A thread that calls `on_death` once `core` has ended, and kills it after `timeout_seconds` of silence while a
    call waits. vLLM 0.32 leaves a caller waiting for ever when its core is killed (measured: its monitor closes the
    connection and wakes nobody). Silence counts ticks of this process, so time in which it was itself stopped does
    not count.
    """

    def __init__(self, core: BaseProcess, *, on_death: Callable[[], None], timeout_seconds: float):
        self.core, self.on_death, self.timeout_seconds = core, on_death, timeout_seconds
        self.is_awaited, self.silent_seconds = False, 0.0
        Thread(target=self._watch, daemon=True, name="vllm-core-watch").start()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        self.silent_seconds, self.is_awaited = 0.0, True
        try:
            yield
        finally:
            self.is_awaited = False

    def _watch(self) -> None:
        while not wait([self.core.sentinel], timeout=TICK_SECONDS):
            self.silent_seconds += TICK_SECONDS
            if self.is_awaited and self.silent_seconds > self.timeout_seconds:
                self.core.kill()
        self.on_death()


class VLLMCore:
    def __init__(self, llm: LLM, watch: CoreWatch, sockets: Path):
        self.llm, self.watch, self.sockets = llm, watch, sockets
        self.adapter: LoRARequest | None = None
        self.is_paused = False

    def add(self, name: str, token_ids: list[int], params: SamplingParams, *, salt: str) -> None:
        """Queue a request. The salt keeps one policy's cache from being read under another."""
        prompt: Any = {"prompt_token_ids": list(token_ids), "cache_salt": salt}
        self.llm.llm_engine.add_request(name, prompt, params, lora_request=self.adapter)

    def step(self) -> list[RequestOutput]:
        with self.watch.awaited():
            return list(self.llm.llm_engine.step())

    def label(self, name: str) -> None:
        with self.watch.awaited():
            self.llm.update_weight_version(name)

    def pause(self) -> None:
        """End all requests; the next steps give each with its tokens so far. None is begun before `resume`."""
        with self.watch.awaited():
            self.llm.sleep(level=0, mode="abort")
        self.is_paused = True

    def resume(self) -> None:
        if self.is_paused:
            with self.watch.awaited():
                self.llm.wake_up(tags=["scheduling"])
        self.is_paused = False

    def load(self, folder: Path) -> None:
        with self.watch.awaited():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self.adapter = None

    def take_by_ipc(self, weights: PolicyWeights, dtype: torch.dtype | None) -> None:
        with self.watch.awaited():
            send_by_ipc(self.llm, weights, dtype)
        self.adapter = None

    def load_adapter(self, folder: Path) -> None:
        """Put the adapter in the place of the one before; from now on every request is computed with it."""
        from vllm.lora.request import LoRARequest

        with self.watch.awaited():
            is_loaded = self.llm.llm_engine.add_lora(LoRARequest(ADAPTER, 1, str(folder), load_inplace=True))
        if not is_loaded:
            raise ValueError(
                f"vLLM did not load the LoRA adapter in {folder}, so turns would be written by an older policy. Start "
                f"the run again; it continues from its checkpoint."
            )
        self.adapter = LoRARequest(ADAPTER, 1, str(folder))

    def empty_prefix_cache(self) -> bool:
        with self.watch.awaited():
            return bool(self.llm.reset_prefix_cache())

    def sleep(self, level: SleepLevel) -> bool:
        """Free the GPU's memory; level 1 keeps weights in host memory. False on CPU, where vLLM has no such mode."""
        if not _on_gpu():
            return False
        with self.watch.awaited():
            self.llm.sleep(level=level)
        return True

    def wake(self, part: SleepingPart) -> None:
        with self.watch.awaited():
            self.llm.wake_up(tags=[part])

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        shutil.rmtree(self.sockets, ignore_errors=True)


def start_core(
    folder: Path, settings: EngineSettings, sampling: SamplingSettings, *, lora: AdapterShape | None
) -> VLLMCore:
    options = settings_of(settings)
    os.environ |= ENVIRONMENT | {"VLLM_ENGINE_READY_TIMEOUT_S": str(int(options.start_timeout_seconds))}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # else each refresh warns of rotations without weights
    try:
        from vllm import LLM
    except ImportError as error:
        raise ValueError(
            f"engine.name is vllm and vLLM cannot be imported ({error}). Run `make setup-vllm-cpu`, or "
            f"`make setup-vllm-gpu` on a machine with an NVIDIA GPU, or set engine.name: transformers."
        ) from None

    check_transfer(options.transfer, mode="in_process", on_gpu=_on_gpu())
    max_model_len = vllm_shared.max_model_len(folder, sampling)
    sockets = vllm_shared.private_folder()
    guardian = own_guardian()
    guardian.watch_descendants()
    guardian.remove(sockets)
    try:
        with _set_variables(vllm_shared.private_sockets(sockets) | ({} if _on_gpu() else _cpu_environment())):
            llm = LLM(
                str(folder),
                **_arguments(options, max_model_len, settings.max_concurrent_episodes),
                **vllm_shared.lora_arguments(lora, folder),
            )
    except (RuntimeError, TimeoutError, ValueError, core_death()) as error:
        shutil.rmtree(sockets, ignore_errors=True)
        raise NotStarted(
            f"vLLM did not start with {folder}: {one_line(error)}. See vLLM's log "
            f"above; check engine.settings (dtype, kv_cache_gib, tensor_parallel_size) against the model and machine."
        ) from error
    client = llm.llm_engine.engine_core
    watch = CoreWatch(
        client.resources.engine_manager.processes[0],
        on_death=lambda: _tell_all_who_wait(client),
        timeout_seconds=options.request_timeout_seconds,
    )
    return VLLMCore(llm, watch, sockets)


def _arguments(options: VLLMSettings, max_model_len: int, max_num_seqs: int) -> dict[str, Any]:
    on_gpu_alone = {"gpu_memory_utilization": options.gpu_memory_utilization, "enable_sleep_mode": True}
    on_cpu_alone = {
        "kv_cache_memory_bytes": options.kv_cache_gib * GIB,
        "block_size": vllm_shared.BLOCK_TOKENS,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": vllm_shared.whole_prompts(max_model_len),
        "distributed_executor_backend": vllm_shared.cpu_executor(options.tensor_parallel_size),
    }
    return {
        "load_format": "safetensors",  # never a pickle
        "trust_remote_code": False,
        "dtype": options.dtype,
        "enforce_eager": options.enforce_eager,
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, after temperature and top-p
        "generation_config": "vllm",  # ignore the model's generation_config.json
        "seed": 0,  # every turn has its own
        "use_tqdm_on_load": False,
        **(on_gpu_alone if _on_gpu() else on_cpu_alone),
        **transfer_arguments(options.transfer),
    }


def _cpu_environment() -> dict[str, str]:
    """Leave one core to the loop that feeds vLLM, as vLLM does where it binds threads."""
    return {**vllm_shared.CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1))}


def _on_gpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


@contextmanager
def _set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _tell_all_who_wait(client: Any) -> None:
    dead = core_death()
    client.resources.engine_dead = True
    client.outputs_queue.put_nowait(dead())
    for future in list(client.utility_results.values()):
        if not future.done():
            future.set_exception(dead())
