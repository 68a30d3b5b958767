"""Engines by name, built from params and a model folder; an engine's module is imported only when it is used.

Budgets beyond the model's context, and prompts that leave no room for a turn, are refused here before weights load.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks.chat.format import ChatFormat
from tasks.chat.shared import shared_chat
from tasks.core.records import Problem
from tasks.models.architecture import model_logp
from tasks.models.differences import refuse_what_is_not_finite
from tasks.models.empty_model import check_attention
from tasks.models.folders import load_model, model_config, stored_dtype
from tasks.models.policy_weights import AdapterShape, PolicyWeights
from tasks.models.settings import ComputeSettings, Dtype
from tasks.models.torch_setup import find_device, free_unused, product_dtype
from tasks.rollouts.engine import AdjustableEngine, Engine, FixedWeights
from tasks.rollouts.kept_models import KeptModels
from tasks.rollouts.probe import compare_logp, probe_sequences
from tasks.rollouts.prompt_room import check_prompts
from tasks.rollouts.settings import EngineSettings, PlaySettings, SamplingSettings
from tasks.tools.base import Environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_checked_chat(
    folder: Path, environment: Environment, problems: Sequence[Problem], sampling: SamplingSettings
) -> ChatFormat:
    """Reads tokenizer and config.json only; ValueError where the tokenizer, the context or a prompt cannot work."""
    chat = shared_chat(folder)
    refuse_thinking_budget(chat, sampling)
    check_prompts(chat, model_config(folder), environment, problems, sampling)
    return chat


def refuse_thinking_budget(chat: ChatFormat, sampling: SamplingSettings) -> None:
    """ValueError where thoughts are to have a budget of their own and the model's cannot be told from its message."""
    if sampling.max_thinking_tokens_per_turn is None:
        return
    if chat.thinking is None:
        raise ValueError(
            "model.path: its chat template knows no thoughts, so sampling.max_thinking_tokens_per_turn would do "
            "nothing. Set it to null, or use a model that thinks."
        )
    if chat.end_of_thought is None:
        raise ValueError(
            f"model.path: {chat.thinking.closing!r} is several tokens of its tokenizer, and an engine stops at one, so "
            f"thoughts can have no budget of their own. Set sampling.max_thinking_tokens_per_turn to null, and "
            f"sampling.max_tokens_per_turn to enough for thought and message."
        )


def load_engine(
    folder: Path,
    chat: ChatFormat,
    *,
    engine: EngineSettings,
    sampling: SamplingSettings,
    compute: ComputeSettings,
    model: PreTrainedModel | None = None,
    lora: AdapterShape | None = None,
) -> Engine:
    """The configured engine over the model in `folder`; the caller closes it.

    `model` is a trainer's: an engine in the same memory generates with it, one with its own memory starts from the
    folder and gets the model's weights at each refresh: where they are a `lora` adapter over those in
    `folder`, the adapter alone. Before such an engine starts, which takes minutes and the GPU, the architecture is
    checked.
    """
    if engine.own.has_own_memory:
        check_attention(folder)
    module = importlib.import_module(f"tasks.engines.{engine.name}.engine")
    found: Engine = module.load_engine(
        folder, chat, engine=engine, sampling=sampling, compute=compute, model=model, lora=lora
    )
    return found


class Engines:
    """One engine for several models in turn, while they have one shape: it gets their weights. One with its own memory
    is refreshed, and checked per model.

    `kept` has the models that play again; with None each is read from its files.
    """

    def __init__(self, play: PlaySettings, kept: KeptModels | None = None):
        self.settings, self.sampling, self.compute = play.engine, play.sampling, play.compute
        self.kept = kept
        self._live: Engine | None = None
        self._shape: Any = None
        self._probed: tuple[list[list[int]], list[list[float]]] | None = None  # sequences, and the engine's log-probs

    def play_as(self, play: PlaySettings) -> None:
        """From now on. Of an engine in this memory the distribution changes; any other change starts another."""
        if play.sampling == self.sampling:
            return
        drawn = {name: getattr(play.sampling, name) for name in ("temperature", "top_p")}
        if self._live is None or self._live.has_own_memory or self.sampling.model_copy(update=drawn) != play.sampling:
            self.close()
        else:
            cast("AdjustableEngine", self._live).set_distribution(**drawn)
        self.sampling = play.sampling

    def over(self, folder: Path, chat: ChatFormat, environment: Environment, problems: Sequence[Problem]) -> Engine:
        """The engine with the weights in `folder`, valid until the next call; `problems` are those it will play."""
        shape = (model_config(folder), chat.tokenizer.get_vocab(), chat.end_ids, self._stops_by(chat))
        is_kept = self._live is not None and shape == self._shape and self._takes(folder)
        if self._live is None or not is_kept:
            self.close()
            is_given = self.kept is not None and not self.settings.own.has_own_memory
            self._live = load_engine(
                folder, chat, engine=self.settings, sampling=self.sampling, compute=self.compute,
                model=self.kept.weights.load(folder, compute=self.compute) if is_given and self.kept else None,
            )  # fmt: skip
            self._shape = shape
        if self._live.has_own_memory:
            probe = probe_sequences(chat, environment, problems, max_tokens=self.sampling.max_tokens_per_episode)
            self._bring(folder, probe, is_new=is_kept or not self._live.knows_its_weights)
            free_unused(find_device(self.compute))
        return self._live

    def _stops_by(self, chat: ChatFormat) -> ChatFormat | None:
        """An engine looks for stop strings in what this format decodes."""
        return chat if self.sampling.stop_strings else None

    def _takes(self, folder: Path) -> bool:
        """Whether the engine goes on with the weights in `folder`; one in this memory has them then. An engine that
        got only some of them is closed.
        """
        assert self._live is not None
        if self._live.has_own_memory:
            return True
        if self.kept is None:
            return False
        engine = cast("AdjustableEngine", self._live)
        try:
            engine.sleep()
            is_filled = self.kept.weights.fill(engine.model, folder)
        except BaseException:
            self.close()
            raise
        if is_filled:
            engine.refresh(PolicyWeights.of(engine.model), engine.policy_version)
        return is_filled

    def _bring(self, folder: Path, probe: list[list[int]], *, is_new: bool) -> None:
        """Load the model beside the engine, give it where it is new to the engine, and compare the two."""
        assert self._live is not None
        model, refused = self._load(folder, dtype=self._dtype_beside_engine(folder)), None
        if is_new:
            refused = _try_refresh(self._live, model)
        self._check(folder, model, probe, remedy=str(refused or self._live.remedy))
        del model
        self._take_back()

    def _load(self, folder: Path, dtype: Dtype | None = None) -> PreTrainedModel:
        if self.kept is None:
            return load_model(folder, compute=self.compute, dtype=dtype)
        return self.kept.lend(folder, compute=self.compute, dtype=dtype)

    def _take_back(self) -> None:
        if self.kept is not None:
            self.kept.take_back()

    def _dtype_beside_engine(self, folder: Path) -> Dtype:
        """The files' own where the engine rounds to no more than that: on one device, memory is short beside it."""
        is_rounded = self.settings.own.weights_dtype(self.compute) in ("auto", "bfloat16")
        is_short = is_rounded and str(stored_dtype(folder)) == "torch.bfloat16"
        return "bfloat16" if is_short else self.compute.weights

    def _check(self, folder: Path, model: PreTrainedModel, probe: list[list[int]], *, remedy: str) -> None:
        assert self._live is not None
        computed = self._live.token_logp(probe)
        dtypes = self.settings.own.weights_dtype(self.compute), self.compute.weights, product_dtype(model.device)
        tolerance = self.settings.tolerance(*dtypes)
        own_logp = model_logp(model, probe)
        refuse_what_is_not_finite(own_logp, model=str(folder))
        found = compare_logp(computed, own_logp)
        if not found.differences.is_within(tolerance):
            raise ValueError(
                f"{folder}: the engine computes with other weights than these. Their log-probs differ (nats): {found}; "
                f"engine.probe_tolerance allows {tolerance}. Another model would be measured. {remedy}."
            )
        self._probed = probe, computed

    def confirm(self, folder: Path) -> None:
        """ValueError where its log-probs changed since it loaded `folder`: its episodes are of more than one model."""
        if self._live is None or self._probed is None:
            return
        probe, before = self._probed
        found = compare_logp(self._live.token_logp(probe), before)
        dtypes = self.settings.own.weights_dtype(self.compute), product_dtype(find_device(self.compute))
        if not found.differences.is_within(self.settings.tolerance(*dtypes)):
            raise ValueError(
                f"{folder}: the engine's weights changed while it was measured (a log-prob of the probe was "
                f"{found.trainer_logp:.5f} before and is {found.engine_logp:.5f} now), so its episodes mix two "
                f"models and were not kept. Find out who else uses the servers in engine.settings.urls, and run again."
            )

    def close(self) -> None:
        self._probed = None
        if self._live is not None:
            self._live.close()
        self._live = None
        self._take_back()


def _try_refresh(live: Engine, model: PreTrainedModel) -> FixedWeights | None:
    try:
        live.refresh(PolicyWeights.of(model), live.policy_version + 1)
    except FixedWeights as refused:
        return refused
    return None
