"""After a refresh: does the engine compute what the trainer computes? Compare log-probs of a fixed small batch.

A partial refresh gives fluent text and plausible log-probs of a policy that does not exist; training on it looks like
an unlucky run. The batch is opening prompts of a few problems, each with its own request repeated and the end-of-turn
token: ordinary text, through every layer and the output head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem
from tasks.models.architecture import model_logp
from tasks.models.policy_weights import PolicyWeights
from tasks.rollouts.engine import Engine
from tasks.tools.base import Environment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class Difference:
    """The token on which engine and trainer differ most; log-probs in nats, temperature 1."""

    sequence: int
    position: int
    engine_logp: float
    trainer_logp: float

    @property
    def nats(self) -> float:
        """NaN on either side counts as infinite."""
        gap = abs(self.engine_logp - self.trainer_logp)
        return gap if gap == gap else float("inf")

    def shown(self) -> str:
        return (
            f"at token {self.position} of probe sequence {self.sequence} its log-prob is {self.engine_logp:.5f} and "
            f"the model's {self.trainer_logp:.5f}, {self.nats:.2g} apart"
        )


class CheckedRefresh:
    """Refreshes an engine that has its own memory, and raises ValueError where the weights did not arrive."""

    def __init__(self, engine: Engine, sequences: Sequence[list[int]], *, tolerance: float):
        self.engine, self.sequences, self.tolerance = engine, sequences, tolerance
        self.refresh_seconds = self.probe_seconds = 0.0

    def __call__(self, weights: PolicyWeights, policy_version: int) -> None:
        start = time.perf_counter()
        self.engine.refresh(weights, policy_version)
        refreshed = time.perf_counter()
        check_weights(self.engine, weights.model, self.sequences, tolerance=self.tolerance)
        self.refresh_seconds += refreshed - start
        self.probe_seconds += time.perf_counter() - refreshed

    def counts(self) -> dict[str, float]:
        return {"refresh_seconds": self.refresh_seconds, "probe_seconds": self.probe_seconds}


def probe_sequences(
    chat: ChatFormat, environment: Environment, problems: Sequence[Problem], *, max_tokens: int
) -> list[list[int]]:
    """From evenly spaced problems, one token short of the context: vLLM writes one after what it scores."""
    chosen = problems[:: max(1, len(problems) // NUM_SEQUENCES)][:NUM_SEQUENCES]
    return [_sequence(chat, environment, problem)[: max_tokens - 1] for problem in chosen]


def _sequence(chat: ChatFormat, environment: Environment, problem: Problem) -> list[int]:
    tools = [tool.schema() for tool in environment.tools_for(problem)]
    request = problem.requests[0]
    return [*chat.prompt_ids(request, tools), *chat.encode(chat.as_data(request)), chat.end_of_turn]


def check_weights(
    engine: Engine, model: PreTrainedModel, sequences: Sequence[list[int]], *, tolerance: float
) -> Difference:
    found = probe_difference(engine, model, sequences)
    if found.nats > tolerance:
        raise ValueError(
            f"after the refresh to policy version {engine.policy_version} the engine does not have the trainer's "
            f"weights: {found.shown()}; engine.probe_tolerance is {tolerance:g}. Training would use episodes of "
            f"another policy. Either the refresh reached only some tensors (an output head tied to the embedding keeps "
            f"its old values), or the engine's dtype is not the trainer's. {engine.remedy}, and run again; it "
            f"continues from the last checkpoint."
        )
    return found


def probe_difference(engine: Engine, model: PreTrainedModel, sequences: Sequence[list[int]]) -> Difference:
    return greatest_difference(engine.token_logp(sequences), model_logp(model, sequences))


def greatest_difference(engine_logp: Sequence[list[float]], trainer_logp: Sequence[list[float]]) -> Difference:
    """Over all tokens of all sequences; positions count from a sequence's first token, which has no log-prob."""
    differences = [
        Difference(number, position, ours, theirs)
        for number, (engine_row, trainer_row) in enumerate(zip(engine_logp, trainer_logp, strict=True))
        for position, (ours, theirs) in enumerate(zip(engine_row, trainer_row, strict=True), start=1)
    ]
    return max(differences, key=lambda difference: difference.nats)
