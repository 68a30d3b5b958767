"""A policy that is a LoRA adapter: vLLM gets the adapter alone, in process and behind a server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tasks.chat.format import load_chat
from tasks.engines.vllm.in_process import VLLMEngine
from tasks.engines.vllm.server_engine import ServerEngine
from tasks.engines.vllm.server_process import ServerProcess, serve_command
from tasks.engines.vllm.shared import Start, lora_arguments
from tasks.learning.shared.lora import Adapter
from tasks.models.architecture import model_logp
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.settings import LoRASettings, on_cpu
from tasks.rollouts.engine import TurnRequest
from tests import tiny
from tests.engine_benches import engine_settings, vllm_settings

pytest.importorskip("vllm")
LORA = LoRASettings(rank=4, alpha=8, target_modules="all-linear")
PROMPT = list(range(20, 150))  # four blocks of the prefix cache
Live = VLLMEngine | ServerEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    embedded = tiny.EMBEDDED.model_copy(update=tiny.HEADS_FOR_VLLM)
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m", embedded=embedded)


@pytest.fixture(scope="module", params=["in_process", "server"])
def engine(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    kind = VLLMEngine if request.param == "in_process" else ServerEngine
    settings = engine_settings("vllm", vllm_settings(tmp_path_factory.mktemp("weights"), mode=request.param))
    live = kind(Start(folder, load_chat(folder), tiny.SAMPLING, settings, LORA))
    yield live
    live.close()


def policy(folder: Path, *, seed: int) -> PolicyWeights:
    """The model with an adapter of random numbers in it; its own forward is what vLLM must compute."""
    model = load_model(folder, compute=on_cpu(1))
    adapter = Adapter(model, LORA, weights="float32")
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter.tensors("default").values():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return adapter.weights("default")


def gap(engine: Live, model: PreTrainedModel) -> float:
    """Nats, over a turn that vLLM writes after the prompt, and over given tokens."""
    engine.submit(TurnRequest(1, PROMPT, max_new_tokens=16, seed=3))
    (reply,) = engine.poll()
    engine.release(1)
    (expected,) = model_logp(model, [[*PROMPT, *reply.token_ids]])
    pairs = [*zip(reply.sampler_logp, expected[-len(reply.token_ids) :], strict=True)]
    lengths = (130, 90, 110)  # together: vLLM maps adapters to the tokens of each
    for given, length in zip(engine.token_logp([PROMPT[:length] for length in lengths]), lengths, strict=True):
        pairs += zip(given, expected[: length - 1], strict=True)
    return max(abs(found - own) for found, own in pairs)


@pytest.mark.drill
def test_each_refresh_brings_another_adapter_and_nothing_of_the_one_before_is_left(engine: Live, folder: Path) -> None:
    """The same prompt each time: what the prefix cache had of it belonged to other weights."""
    first, second = policy(folder, seed=1), policy(folder, seed=2)
    assert gap(engine, load_model(folder, compute=on_cpu(1))) < 1e-4
    for version, weights in enumerate((first, second, first), start=1):
        engine.refresh(weights, version)
        assert gap(engine, weights.model) < 1e-4
    assert gap(engine, second.model) > 0.1
    own = engine.weights if isinstance(engine, VLLMEngine) else engine.weights_folder
    assert sorted(item.name.split("-")[0] for item in own.folder.iterdir()) == ["adapter", "adapter", "version"]


@pytest.mark.drill
def test_a_vllm_that_is_started_again_has_the_adapter(engine: Live, folder: Path) -> None:
    weights = policy(folder, seed=3)
    engine.refresh(weights, 7)
    before = engine.counts()["engine_restarts"]
    if isinstance(engine, VLLMEngine):
        os.kill(engine.core.watch.core.pid or 0, signal.SIGKILL)
    else:
        assert engine.servers is not None
        process = engine.servers.all[0].process
        assert isinstance(process, ServerProcess)
        os.killpg(process.pid, signal.SIGKILL)
    assert gap(engine, weights.model) < 1e-4
    assert engine.counts()["engine_restarts"] == before + 1


@pytest.mark.drill
def test_whole_weights_take_the_place_of_the_adapter_and_what_is_below_it(engine: Live, folder: Path) -> None:
    """Comes last: from then on no adapter fits, and one is merged."""
    model = load_model(folder, compute=on_cpu(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    engine.refresh(PolicyWeights.of(model), 8)
    assert gap(engine, model) < 1e-4


@pytest.mark.parametrize(("rank", "allocated"), [(1, 1), (4, 8), (64, 64), (400, 512)])
def test_vllm_has_room_for_one_adapter_of_at_least_the_policys_rank(folder: Path, rank: int, allocated: int) -> None:
    assert lora_arguments(None, folder) == {}
    given = lora_arguments(LoRASettings(rank=rank, alpha=8, target_modules=["q_proj"]), folder)
    assert given == {
        "enable_lora": True, "max_lora_rank": allocated, "max_loras": 1, "max_cpu_loras": 1,
        "lora_target_modules": ["q_proj"],
    }  # fmt: skip


def test_all_linear_is_every_matrix_of_the_layers_and_never_the_head(folder: Path) -> None:
    own = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert lora_arguments(LORA, folder)["lora_target_modules"] == own


def test_a_rank_above_vllms_greatest_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.lora\.rank is 513 .* Lower the rank"):
        lora_arguments(LORA.model_copy(update={"rank": 513}), folder)


def test_a_server_is_started_with_the_same(folder: Path) -> None:
    """The drills above start one."""
    command = serve_command(
        folder,
        vllm_settings(folder, mode="server"),
        socket=folder / "server",
        max_model_len=8,
        max_num_seqs=1,
        on_gpu=True,
        lora=LORA,
    )
    text = " ".join(command)
    assert "--enable-lora --max-lora-rank 8 --max-loras 1 --max-cpu-loras 1 --lora-target-modules down_proj" in text
