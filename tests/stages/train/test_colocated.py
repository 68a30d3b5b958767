"""A vLLM that shares the GPU with the trainer, with a core of a few lines in its place: who has the memory when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.engines.vllm import in_process
from tasks.learning.shared.optimizer import Optimizer
from tasks.stages.train import groups as grouping
from tasks.stages.train import policy, serving
from tasks.stages.train import run as training
from tests import tiny
from tests.engine_benches import engine_settings, vllm_settings
from tests.stages.train.test_training import LORA, settings

pytestmark = pytest.mark.slow
ITERATION = ["empty_cache", "wake weights", "load", "wake kv_cache", "roll out", "sleep", "offload in", "offload out"]


class Core:
    """Notes what it is asked; each turn is one token, which the turn's seed chooses, with a log-prob of -1."""

    def __init__(self, calls: list[str]):
        self.calls, self.asked = calls, dict[str, tuple[list[int], Any]]()
        self.version = ""

    def note(self, call: str) -> None:
        if self.calls[-1:] != [call]:
            self.calls.append(call)

    def sleep(self, level: int) -> bool:
        assert not self.asked
        self.note("sleep" if level == 2 else "sleep, weights kept")
        return True

    def wake(self, part: str) -> None:
        self.note(f"wake {part}")

    def label(self, name: str) -> None:
        self.version = name

    def load(self, folder: Path) -> None:
        self.note("load")

    def load_adapter(self, folder: Path) -> None:
        assert (folder / "adapter_model.safetensors").exists()
        self.note("load adapter")

    def empty_prefix_cache(self) -> bool:
        return True

    def add(self, name: str, token_ids: list[int], params: Any, *, salt: str) -> None:
        assert salt == self.version
        self.asked[name] = (token_ids, params)

    def step(self) -> list[Any]:
        asked, self.asked = self.asked, {}
        if any("prompt_logprobs" not in params for _, params in asked.values()):
            self.note("roll out")
        return [self.answer(name, *given) for name, given in asked.items()]

    def answer(self, name: str, token_ids: list[int], params: dict[str, Any]) -> Any:
        written = [20 + params.get("seed", 0) % 300]
        logp = SimpleNamespace(logprob=-1.0)
        completion = SimpleNamespace(
            token_ids=written,
            logprobs=[{written[0]: logp}],
            finish_reason="length",
            weight_versions=[SimpleNamespace(version=self.version)],
        )
        prompt_logprobs = [None, *({token: logp} for token in token_ids[1:])]
        return SimpleNamespace(
            request_id=name, outputs=[completion], prompt_token_ids=token_ids, prompt_logprobs=prompt_logprobs,
            num_cached_tokens=0,
        )  # fmt: skip

    def resume(self) -> None:
        """No turn was under way."""
        assert not self.asked

    def stop(self) -> None:
        """It is no process."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In order, what vLLM's core, the optimizer's host memory and torch's cache are asked, and the model's loading."""
    noted: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            noted.append(name)
            return function(*given, **named)

        return call

    monkeypatch.setattr(in_process, "start_core", noting("start", lambda *given, **named: Core(noted)))
    monkeypatch.setattr(in_process, "core_death", lambda: ConnectionError)
    monkeypatch.setattr(in_process, "turn_params", lambda turn, sampling, end_ids: {"seed": turn.request.seed})
    monkeypatch.setattr(in_process, "score_params", lambda: {"prompt_logprobs": 0})
    monkeypatch.setattr(policy, "load_model", noting("load the trainer's model", policy.load_model))
    monkeypatch.setattr(serving, "free_unused", noting("empty_cache", lambda device: None))
    monkeypatch.setattr(Optimizer, "load_to_device", noting("offload in", lambda self: None))
    monkeypatch.setattr(Optimizer, "offload", noting("offload out", lambda self: None))
    monkeypatch.setattr(grouping, "reward", tiny.reward_of_any_text)
    return noted


def train(folder: Path, **changed: Any) -> None:
    """Two iterations. The core's log-probs are made up, so no tolerance is small enough to matter."""
    start = tiny.model_folder(folder / "m")
    engine = engine_settings("vllm", vllm_settings(folder / "weights")).model_copy(update={"probe_tolerance": 1e6})
    options = settings(num_iterations=2, **changed).model_copy(update={"engine": engine})
    run = training.TrainingRun(options, start=start, problems=tiny.problems(40), resume=folder / "resume")
    try:
        before = {name: tensor.clone() for name, tensor in run.trainer.model.state_dict().items()}
        while not run.is_done:
            run.iterate()
        assert any(not torch.equal(before[name], now) for name, now in run.trainer.model.state_dict().items())
    finally:
        run.close()


def test_vllm_has_the_gpu_first_and_sleeps_whenever_the_trainer_computes(calls: list[str], tmp_path: Path) -> None:
    """The trainer's moments go out as soon as they are made, which is before the first iteration."""
    train(tmp_path)
    assert calls == ["start", "sleep", "load the trainer's model", "offload out", *ITERATION, *ITERATION]


def test_under_lora_the_weights_below_the_adapter_are_kept_while_vllm_sleeps(calls: list[str], tmp_path: Path) -> None:
    train(tmp_path, lora=LORA)
    sleeps = [call for call in calls if call.startswith("sleep")]
    assert sleeps == ["sleep, weights kept"] * 3
    assert calls.count("load adapter") == 2
    assert "load" not in calls
