"""The model that answers, and how the next one takes its place once it has proved that it computes what it should.

An engine in this process is made anew beside the one that answers, and both are in memory until they change places. One
with its own memory (vLLM) is refreshed while nobody asks; if its probe fails, it gets the weights before back, and
if these are not proved again either, the engine is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.chat.format import ChatFormat, load_chat
from tasks.models.architecture import model_logp
from tasks.models.folders import load_model, model_config
from tasks.models.policy_weights import PolicyWeights
from tasks.models.torch_setup import find_device, free_unused, product_dtype
from tasks.rollouts.engine import Engine, FixedWeights, TurnReply, TurnRequest
from tasks.rollouts.load import load_engine, refuse_thinking_budget
from tasks.rollouts.probe import compare_logp
from tasks.rollouts.prompt_room import check_context
from tasks.rollouts.settings import PlaySettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBES = (
    "Say in one word what the weather is like.",
    "Book the first train of the day, please, and tell me its price.",
)
PROBE_TOKENS, PROBE_SEED, PROBE_EPISODE = 16, 0, 0  # handles of conversations begin at 1


@dataclass(frozen=True, slots=True)
class Served:
    """`version` is what every reply says; the files are in `folder`."""

    version: str
    folder: Path
    chat: ChatFormat
    engine: Engine


Install = Callable[[Served], Served]  # the one before, which no turn uses any more → the one that answers from now on


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model made ready: called as an `Install`, or dropped where it is not wanted any more."""

    install: Install
    drop: Callable[[], None]

    def __call__(self, before: Served) -> Served:
        return self.install(before)


class ModelHouse:
    """Opens models with the settings of `play`. ValueError where one cannot be served, and says why."""

    def __init__(self, play: PlaySettings):
        self.engine, self.sampling, self.compute = play.engine, play.sampling, play.compute

    def open(self, version: str, folder: Path) -> Served:
        """The first model, probed."""
        chat, model = self._chat(folder), None
        if not self.engine.own.has_own_memory:
            model = load_model(folder, compute=self.compute)
        engine = load_engine(
            folder, chat, engine=self.engine, sampling=self.sampling, compute=self.compute, model=model
        )
        served = Served(version, folder, chat, engine)
        try:
            self._probe(served, model or load_model(folder, compute=self.compute))
        except BaseException:
            engine.close()
            raise
        return served

    def prepare(self, version: str, folder: Path, before: Served) -> Prepared:
        """All that can be done while `before` answers. What is returned is called when no turn is under way, and
        leaves `before` as it was where it raises ValueError. RuntimeError: nobody knows what the engine computes now.
        """
        if before.engine.has_own_memory:
            return self._refresh(version, folder, before)
        fresh = self.open(version, folder)

        def install(before: Served) -> Served:
            before.engine.close()
            return fresh

        return Prepared(install, fresh.engine.close)

    def _chat(self, folder: Path) -> ChatFormat:
        chat = load_chat(folder)
        refuse_thinking_budget(chat, self.sampling)
        check_context(model_config(folder), self.sampling)
        return chat

    def _refresh(self, version: str, folder: Path, before: Served) -> Prepared:
        chat = self._chat(folder)
        if (model_config(folder), chat.tokenizer.get_vocab()) != (
            model_config(before.folder),
            before.chat.tokenizer.get_vocab(),
        ):
            raise ValueError(
                f"{version} has another architecture or vocabulary than {before.version}, and a running engine takes "
                f"weights of its own shape only. Start `serve` again to serve it."
            )
        model = load_model(folder, compute=self.compute)
        fresh = Served(version, folder, chat, before.engine)

        def install(before: Served) -> Served:
            try:
                self._give(fresh, model)
            except ValueError as refused:
                self._give_back(before, refused)
                raise
            finally:
                free_unused(find_device(self.compute))
            return fresh

        return Prepared(install, lambda: None)

    def _give_back(self, before: Served, refused: ValueError) -> None:
        try:
            self._give(before, load_model(before.folder, compute=self.compute))
        except ValueError as error:
            raise RuntimeError(f"{refused} The weights before were not given back either: {error}") from error

    def _give(self, served: Served, model: PreTrainedModel) -> None:
        try:
            served.engine.refresh(PolicyWeights.of(model), served.engine.policy_version + 1)
        except FixedWeights as refused:
            raise ValueError(str(refused)) from None
        self._probe(served, model)

    def _probe(self, served: Served, model: PreTrainedModel) -> None:
        """ValueError where the engine's log-probs are not those of `model`, or are no numbers."""
        chat, engine = served.chat, served.engine
        prompt = chat.prompt_ids(PROBES[0], [])
        texts = [[*chat.prompt_ids(text, []), *chat.encode(text), chat.end_of_turn] for text in PROBES]
        written = self._write(engine, prompt)
        sequences = [[*prompt, *written.token_ids], *(ids[: self.sampling.max_tokens_per_episode - 1] for ids in texts)]
        ours, theirs = engine.token_logp(sequences), model_logp(model, sequences)
        if self.sampling.temperature == self.sampling.top_p == 1:  # what it samples under is then what it computes
            ours.append(written.sampler_logp)
            theirs.append(theirs[0][-len(written.token_ids) :])
        found = compare_logp(ours, theirs)
        dtypes = self.engine.own.weights_dtype(self.compute), self.compute.weights, product_dtype(model.device)
        tolerance = self.engine.tolerance(*dtypes)
        if not found.differences.is_within(tolerance):
            raise ValueError(
                f"{served.version}: its probe failed, so its replies would be another model's. Engine and model differ "
                f"(nats): {found}; engine.probe_tolerance allows {tolerance}. {engine.remedy}, or roll it back."
            )

    def _write(self, engine: Engine, prompt: list[int]) -> TurnReply:
        """A turn that the engine writes as it will for others: a step at a time, from its cache."""
        room = min(PROBE_TOKENS, self.sampling.max_tokens_per_turn, self.sampling.max_tokens_per_episode - len(prompt))
        engine.submit(TurnRequest(PROBE_EPISODE, prompt, room, PROBE_SEED))
        replies = engine.poll()
        while not replies:
            replies = engine.poll()
        engine.release(PROBE_EPISODE)
        return replies[0]
