"""How a model takes the place of another in an engine with its own memory, which is refreshed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.chat.format import load_chat
from tasks.commands.serve.loop import EngineLoop
from tasks.commands.serve.served import ModelHouse, Served
from tasks.gateway.completions import CompletionRequest, ProtocolError
from tasks.models.folders import load_model
from tasks.models.policy_weights import PolicyWeights
from tasks.rollouts.load import load_engine
from tests import tiny
from tests.commands.serve.clients import WAIT_SECONDS, user
from tests.commands.serve.conftest import PLAY

pytestmark = pytest.mark.slow


class OwnMemory:
    """The in-process engine over a copy of its own, as vLLM has one; `loses` is a part of a tensor's name."""

    has_own_memory = knows_its_weights = True
    loses = ""

    def __init__(self, folder: Path):
        self.model = load_model(folder, compute=PLAY.compute)
        self.inner = load_engine(
            folder,
            load_chat(folder),
            engine=PLAY.engine,
            sampling=PLAY.sampling,
            compute=PLAY.compute,
            model=self.model,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @torch.no_grad()
    def refresh(self, weights: PolicyWeights, policy_version: int) -> None:
        own = dict(self.model.state_dict())
        for name, tensor in weights.tensors():
            if not (self.loses and self.loses in name):
                own[name].copy_(tensor)
        self.inner.refresh(PolicyWeights.of(self.model), policy_version)


def logp(engine: Any) -> list[float]:
    return list(engine.token_logp([[5, 6, 7, 8]])[0])


def test_a_refreshed_engine_computes_the_next_model_or_the_one_before_if_tensors_are_lost(models: list[Path]):
    engine, house = OwnMemory(models[0]), ModelHouse(PLAY)
    first = Served("agent/1", models[0], load_chat(models[0]), engine)
    of_first = logp(engine)

    second = house.prepare("agent/2", models[1], first)(first)
    of_second = logp(engine)
    assert (second.version, second.engine) == ("agent/2", engine)
    assert of_second == pytest.approx(logp(OwnMemory(models[1]))) and of_second != pytest.approx(of_first)

    engine.loses = "layers.0.mlp"
    with pytest.raises(ValueError, match="agent/1: its probe failed"):
        house.prepare("agent/1", models[0], second)(second)
    engine.loses = ""
    house.prepare("agent/1", models[0], second)(second)
    assert logp(engine) == pytest.approx(of_first)


def test_if_the_weights_before_are_not_proved_again_nothing_answers_any_more(models: list[Path]):
    class Spoiled(OwnMemory):
        def refresh(self, weights: PolicyWeights, policy_version: int) -> None:
            super().refresh(weights, policy_version)
            with torch.no_grad():
                next(self.model.parameters()).mul_(3.0)

    first = Served("agent/1", models[0], load_chat(models[0]), Spoiled(models[0]))
    loop = EngineLoop(first, PLAY.sampling, name="agent", max_under_way=8, max_waiting=8)
    loop.start()
    failed = loop.exchange(ModelHouse(PLAY).prepare("agent/2", models[1], first)).exception(WAIT_SECONDS)
    assert isinstance(failed, RuntimeError) and "agent/2: its probe failed" in str(failed)
    assert "not given back either: agent/1: its probe failed" in str(failed)
    loop.end()
    assert loop.fault is failed
    with pytest.raises(ProtocolError) as refused:
        loop.complete("", CompletionRequest("agent", [user("hello")]))
    assert refused.value.status == 503


def test_a_model_of_another_shape_is_refused_before_anybody_waits_for_it(models: list[Path], tmp_path: Path):
    engine = OwnMemory(models[0])
    first = Served("agent/1", models[0], load_chat(models[0]), engine)
    other = tiny.model_folder(tmp_path / "m", embedded=tiny.EMBEDDED.model_copy(update={"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"another architecture.*Start `serve` again"):
        ModelHouse(PLAY).prepare("agent/2", other, first)
    roomy = PLAY.model_copy(update={"sampling": tiny.ROOMY})
    with pytest.raises(ValueError, match=r"max_tokens_per_episode is 600 and the model's context is 256"):
        ModelHouse(roomy).open("agent/1", models[0])
