"""After a refresh: does the engine compute what the trainer computes? Compare log-probs of a fixed small batch.

A partial refresh gives fluent text and plausible log-probs of a policy that does not exist; training on it looks like
an unlucky run. The batch is opening prompts of a few problems, each with its own request repeated and the end-of-turn
token: ordinary text, through every layer and the output head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem
from tasks.models.differences import Differences, Tolerance, refuse_what_is_not_finite
from tasks.models.policy_weights import PolicyWeights, Probe
from tasks.rollouts.engine import Engine
from tasks.tools.base import Environment

NUM_SEQUENCES = 4
LogProbs = list[list[float]]  # of every token but the first of each probe sequence


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engine and trainer over the probe: how far apart, and the token where most; log-probs in nats, temperature 1."""

    differences: Differences
    sequence: int
    position: int
    engine_logp: float
    trainer_logp: float

    def __str__(self) -> str:
        return (
            f"{self.differences}; at token {self.position} of probe sequence {self.sequence} its log-prob is "
            f"{self.engine_logp:.5f} and the model's {self.trainer_logp:.5f}"
        )


class CheckedRefresh:
    """Refreshes an engine that has its own memory, and raises ValueError where the weights did not arrive."""

    def __init__(self, engine: Engine, sequences: Sequence[list[int]], *, tolerance: Tolerance):
        self.engine, self.sequences, self.tolerance = engine, sequences, tolerance
        self.refresh_seconds = self.probe_seconds = 0.0
        self.last: Comparison | None = None

    def __call__(self, weights: PolicyWeights, policy_version: int, trainer_logp: LogProbs) -> None:
        """`trainer_logp` is what the trainer's own forward gives with these weights."""
        start = time.perf_counter()
        probe = Probe(self.sequences, trainer_logp, self.tolerance)
        self.engine.refresh(replace(weights, probe=probe), policy_version)
        refreshed = time.perf_counter()
        self.last = check_weights(self.engine, trainer_logp, self.sequences, tolerance=self.tolerance)
        self.refresh_seconds += refreshed - start
        self.probe_seconds += time.perf_counter() - refreshed

    def counts(self) -> dict[str, float]:
        return {"refresh_seconds": self.refresh_seconds, "probe_seconds": self.probe_seconds}

    def metrics(self) -> dict[str, float]:
        """Of the last probe, in nats."""
        if self.last is None:
            return {}
        found = self.last.differences
        return {"probe_mean": found.mean, "probe_p50": found.median, "probe_p99": found.p99, "probe_max": found.max}


def probe_sequences(
    chat: ChatFormat, environment: Environment, problems: Sequence[Problem], *, max_tokens: int
) -> list[list[int]]:
    """From evenly spaced problems, one token short of the context: vLLM writes one after what it scores."""
    chosen = problems[:: max(1, len(problems) // NUM_SEQUENCES)][:NUM_SEQUENCES]
    return [_sequence(chat, environment, problem)[: max_tokens - 1] for problem in chosen]


def _sequence(chat: ChatFormat, environment: Environment, problem: Problem) -> list[int]:
    tools = [tool.schema() for tool in environment.tools_for(problem)]
    request = problem.requests[0]
    return [
        *chat.prompt_ids(request, tools, environment.rules_for(problem)),
        *chat.encode(chat.as_data(request)),
        chat.end_of_turn,
    ]


def check_weights(
    engine: Engine, trainer_logp: LogProbs, sequences: Sequence[list[int]], *, tolerance: Tolerance
) -> Comparison:
    refuse_what_is_not_finite(trainer_logp, model=f"policy version {engine.policy_version}")
    found = compare_logp(engine.token_logp(sequences), trainer_logp)
    if not found.differences.is_within(tolerance):
        raise ValueError(
            f"after the refresh to policy version {engine.policy_version} the engine does not have the trainer's "
            f"weights. Their log-probs differ (nats): {found}; engine.probe_tolerance allows {tolerance}. Training "
            f"would use episodes of another policy. Either the refresh reached only some tensors (an output head tied "
            f"to the embedding keeps its old values), or the engine's dtype is not the trainer's. {engine.remedy}, and "
            f"run again; it continues from the last checkpoint."
        )
    return found


def compare_logp(engine_logp: LogProbs, trainer_logp: LogProbs) -> Comparison:
    """Over all tokens of all sequences; positions count from a sequence's first token, which has no log-prob."""
    tokens = [
        (number, position, ours, theirs)
        for number, (engine_row, trainer_row) in enumerate(zip(engine_logp, trainer_logp, strict=True))
        for position, (ours, theirs) in enumerate(zip(engine_row, trainer_row, strict=True), start=1)
    ]
    gaps = [ours - theirs for *_, ours, theirs in tokens]
    worst = max(range(len(gaps)), key=lambda place: abs(gaps[place]) if gaps[place] == gaps[place] else float("inf"))
    return Comparison(Differences.of(gaps), *tokens[worst])
