"""Weights by NCCL, which needs GPUs: what can be held here against vLLM's own classes and a real server's routes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tasks.chat.format import load_chat
from tasks.engines.vllm.client import VLLMClient
from tasks.engines.vllm.nccl import Routes, copies, own_address, source_of, trainer_group
from tasks.engines.vllm.served_tensors import served_tensors
from tasks.engines.vllm.server_engine import ServerEngine
from tasks.engines.vllm.server_process import ServerDown, serve_command
from tasks.engines.vllm.shared import Start
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import on_cpu
from tests import tiny
from tests.engine_benches import engine_settings, vllm_settings

if TYPE_CHECKING:
    from tests.engine_benches import VLLMServerBench

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow
NCCL = {"mode": "server", "transfer": "nccl"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(served_tensors(PolicyWeights.of(load_model(folder, compute=on_cpu(1))), torch.bfloat16))


@pytest.fixture(scope="module")
def client(vllm_server: VLLMServerBench) -> VLLMClient:
    """Of a real server, started to take weights from a folder."""
    engine, _ = vllm_server.engine()
    assert isinstance(engine, ServerEngine) and engine.servers is not None
    return next(server.client for server in engine.servers.all if server.state == "ready")


def test_without_a_gpu_the_engine_refuses_in_one_line(folder: Path, tmp_path: Path) -> None:
    settings = engine_settings("vllm", vllm_settings(tmp_path, **NCCL))
    with pytest.raises(ValueError, match="transfer is nccl, which goes from GPU to GPU, and there is none") as error:
        ServerEngine(Start(folder, load_chat(folder), tiny.SAMPLING, settings, None))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="the policy is on cpu, so there is no GPU memory to send from"):
        copies(PolicyWeights.of(load_model(folder, compute=on_cpu(1))), torch.bfloat16)


def test_a_server_is_told_to_expect_weights_by_nccl_in_words_vllm_reads(tmp_path: Path) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    command = serve_command(
        tmp_path,
        vllm_settings(tmp_path, **NCCL),
        socket=tmp_path / "server",
        max_model_len=8,
        max_num_seqs=1,
        on_gpu=True,
    )
    given = json.loads(command[command.index("--weight-transfer-config") + 1])
    assert WeightTransferConfig(**given).backend == "nccl"
    assert "nccl" in WeightTransferEngineFactory._registry


def test_the_group_is_the_trainer_and_every_worker_of_one_server() -> None:
    """Two GPUs: three ranks, and both sides meet where the server can reach this machine."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    group = trainer_group("http://127.0.0.1:8000", 2)
    assert (group.backend, group.rank, group.world_size, group.master_address) == ("nccl", 0, 3, "127.0.0.1")
    assert group.is_sender and 1024 <= group.master_port < 65536
    assert own_address("http://localhost") == own_address("unix:/tmp/turnwise-x/server") == "127.0.0.1"
    inspect.signature(NCCLTrainerWeightTransferEngine.trainer_init).bind(group, client=None, source=None)


def test_what_is_announced_is_what_is_sent_and_a_worker_can_read_it(tensors: dict[str, torch.Tensor]) -> None:
    """By vLLM's own check of the one against the other; the head is there, though it shares the embedding's tensor."""
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerWeightTransferEngine,
        NCCLWeightTransferUpdateInfo,
    )

    source = source_of(tensors, torch.device("cpu"))
    sent = list(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata()))
    assert len(sent) == 25 and "lm_head.weight" in dict(sent)  # 2 layers of 11, embedding, norm, head
    assert {str(item.dtype) for item in source.metadata()} == {"torch.bfloat16"}, "the engine's, not the trainer's"
    names = [item.name for item in source.metadata()]
    update = NCCLWeightTransferUpdateInfo(names, ["bfloat16"] * 25, [list(t.shape) for t in tensors.values()])
    opening = worker_init_payload(
        NCCLWeightTransferInitInfo(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2)
    )
    for body in (asdict(update), opening):
        assert json.loads(json.dumps(body)) == body, "it goes over HTTP"


def test_a_real_server_has_every_route_and_says_that_it_was_not_started_for_it(client: VLLMClient) -> None:
    """A body it could not read would be our mistake, a ValueError; and it goes on answering turns."""
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

    from tasks.core.background import run

    assert run(client.num_workers()).result() == 1
    assert isinstance(Routes(client), VLLMWeightSyncClient)
    update: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": []}
    calls: dict[str, Callable[[Routes], None]] = {
        "/init_weight_transfer_engine": lambda routes: routes.init_weight_transfer_engine({"rank_offset": 1}),
        "/start_weight_update": Routes.start_weight_update,
        "/update_weights": lambda routes: routes.update_weights(update),
        "/finish_weight_update": Routes.finish_weight_update,
    }
    for route, call in calls.items():  # by a connection of its own: the server ends one after an error
        own = VLLMClient(
            client.url,
            model=client.model,
            sampling=tiny.SAMPLING,
            end_ids=(0,),
            vocabulary_size=client.vocabulary_size,
            timeout_seconds=120,
        )
        with pytest.raises(ServerDown, match=f"status 500 at {route}"):
            call(Routes(own))
        run(own.close()).result()
    answer = run(client.generate([5, 6, 7], max_new_tokens=2, seed=1, cache_salt=None)).result()
    assert len(answer.token_ids) == 2
