"""Engines set up for tests, each over a tiny random model with the weights a plain forward can check.

A bench hands out an engine with the settings a test asks for and the model whose weights it has. For transformers that
is a new one each time; vLLM takes half a minute to start, so that one engine lives on and is refreshed between tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from transformers import PreTrainedModel

from tasks.chat.format import ChatFormat, load_chat
from tasks.core.records import Trajectory
from tasks.engines.vllm.server import Server
from tasks.engines.vllm.server_process import ServerProcess
from tasks.engines.vllm.settings import VLLMSettings
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import on_cpu
from tasks.rollouts.collect import Collector
from tasks.rollouts.engine import Engine
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.load import load_engine
from tasks.rollouts.settings import EngineSettings, SamplingSettings
from tests import tiny

MAX_CONCURRENCY = 64
SERVERS = {"mode": "server", "num_servers": 2, "max_restarts": 10}


class Bench(Protocol):
    """`tolerance` is how far (nats) log-probs may be from a plain float32 forward."""

    folder: Path
    chat: ChatFormat
    tolerance: float

    def engine(self, sampling: SamplingSettings = tiny.SAMPLING) -> tuple[Engine, PreTrainedModel]:
        """An engine with the weights of the folder, and the model it takes new ones from."""
        ...

    def close(self) -> None: ...


class TransformersBench:
    tolerance = 1e-5

    def __init__(self, folder: Path, architecture: str, *, num_threads: int = 1):
        self.folder, self.num_threads = tiny.model_folder(folder / "m", architecture), num_threads
        self.chat = load_chat(self.folder)

    def engine(self, sampling: SamplingSettings = tiny.SAMPLING) -> tuple[Engine, PreTrainedModel]:
        model = load_model(self.folder, compute=on_cpu(self.num_threads))
        settings = engine_settings("transformers")
        return load_engine(
            self.folder, self.chat, engine=settings, sampling=sampling, compute=on_cpu(self.num_threads), model=model
        ), model

    def close(self) -> None:
        """Nothing is held."""


class VLLMBench:
    """vLLM by mode. Its engine reads `sampling` anew for each turn, so that a test can change it; not its budgets'
    greatest size, which vLLM is started with.
    """

    tolerance = 1e-4

    def __init__(self, folder: Path, **vllm: Any):
        self.folder = tiny.model_folder(folder / "m", embedded=tiny.EMBEDDED.model_copy(update=tiny.HEADS_FOR_VLLM))
        self.chat = load_chat(self.folder)
        self.settings = engine_settings("vllm", vllm_settings(folder / "weights", **vllm))
        self.live: Any = load_engine(
            self.folder, self.chat, engine=self.settings, sampling=tiny.SAMPLING, compute=on_cpu(1)
        )

    def engine(self, sampling: SamplingSettings = tiny.SAMPLING) -> tuple[Engine, PreTrainedModel]:
        model = load_model(self.folder, compute=on_cpu(1))
        self.live.sampling = sampling
        self.live.refresh(PolicyWeights.of(model), self.live.policy_version + 1)
        return self.live, model

    def close(self) -> None:
        self.live.close()


class VLLMServerBench(VLLMBench):
    """Servers of ours. They may be killed: whoever comes next goes on with whichever is up."""

    def __init__(self, folder: Path, *, num_servers: int):
        super().__init__(folder, **SERVERS | {"num_servers": num_servers})

    def close(self) -> None:
        """Every process of the servers must be gone then."""
        servers = self.live.servers.all if self.live.servers else []  # they start with the first request
        started = [process for server in servers for process in group_of(server)]
        super().close()
        assert not [process for process in started if is_running(process)]

    def engine(self, sampling: SamplingSettings = tiny.SAMPLING) -> tuple[Engine, PreTrainedModel]:
        engine, model = super().engine(sampling)
        for server in self.live.servers.all:  # what asks a server holds the settings too
            server.client.sampling = sampling
        return engine, model


def group_of(server: Server) -> list[psutil.Process]:
    """Every process of a server: API, engine and workers."""
    assert isinstance(server.process, ServerProcess)
    group = server.process.pid
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def engine_settings(name: str, settings: VLLMSettings | None = None) -> EngineSettings:
    return EngineSettings.model_validate(
        {"name": name, "max_concurrent_episodes": MAX_CONCURRENCY, "probe_tolerance": 1e-3, "settings": settings}
    )


def vllm_settings(folder: Path, **changed: Any) -> VLLMSettings:
    return VLLMSettings.model_validate(
        {
            "mode": "in_process",
            "urls": [],
            "num_servers": 1,
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_gib": 1,
            "gpu_memory_utilization": 0.5,
            "tensor_parallel_size": 1,
            "transfer": "disk",
            "folder": str(folder),
            "start_timeout_seconds": 600,
            "request_timeout_seconds": 120,
            "max_restarts": 2,
        }
        | changed
    )


def play(
    bench: Bench, *, concurrency: int, sampling: SamplingSettings = tiny.SAMPLING, num_problems: int = 22
) -> list[Trajectory]:
    """44 episodes, 22 problems twice each; or of the first few of those problems."""
    engine, _ = bench.engine(sampling)
    keys = [EpisodeKey(problem, 0, sample) for problem in tiny.problems(22)[:num_problems] for sample in range(2)]
    return collector(bench, engine, sampling=sampling, concurrency=concurrency).collect(keys)


def collector(bench: Bench, engine: Engine, *, sampling: SamplingSettings, concurrency: int) -> Collector:
    return Collector(
        EngineEpisodes(engine, bench.chat, sampling),
        TravelDesk(),
        max_concurrent_episodes=concurrency,
        seed=5,
        stage="test",
    )


def plain_logp(model: PreTrainedModel, token_ids: Sequence[int], *, temperature: float = 1, top_p: float = 1) -> Any:
    """Log-prob of every token but the first under the sampling distribution, from one ordinary forward."""
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        logp_TV = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, -1)
    if top_p < 1:
        sorted_logp, order = logp_TV.sort(descending=True)
        is_cut = sorted_logp.exp().cumsum(-1) - sorted_logp.exp() >= top_p
        logp_TV = torch.log_softmax(logp_TV.masked_fill(is_cut.gather(-1, order.argsort()), float("-inf")), -1)
    return logp_TV.gather(-1, ids[0, 1:, None])[:, 0].tolist()
