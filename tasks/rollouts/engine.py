"""The protocol of an engine: token ids in, sampled ids with their log-probs out, one turn of one episode at a time.

Token ids are only ever appended. An engine keeps whatever it has computed for an episode until it is released, so a
tool reply costs its own tokens and nothing is rendered or tokenised twice. `submit` never blocks; `poll` works until
at least one turn is complete or the caller has something to add, so that a tool's answer waits for nobody's turn. When
answers arrive decides which episodes share a step, never what random numbers an episode gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EpisodeHandle = int
Finish = Literal["end_of_turn", "stop_string", "length"]


class FixedWeights(ValueError):
    """The engine generates with weights that somebody else chose, and takes no others."""


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One more turn of an episode: the ids to append (prompt or tool replies), the token limit, the turn's seed."""

    episode: EpisodeHandle
    token_ids: list[int]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class TurnReply:
    """What the policy wrote: ids (the end-of-turn token included) and the log-prob (nats) of each under the sampling
    distribution in use. `finish` says what ended the turn; `length` is the token limit, which cut it. `policy_version`
    is that of the weights that wrote it.
    """

    episode: EpisodeHandle
    token_ids: list[int]
    sampler_logp: list[float]
    finish: Finish
    policy_version: int = 0


class Engine(Protocol):
    """Generates turns; `policy_version` says which weights it does so with.

    An engine that `has_own_memory` starts from a folder, takes new weights by `refresh`, and may serve another model of
    the same shape; one without generates with the model it was made over. Whether it computes what the model does is
    probed, and `remedy` says what to change in params where it does not. One that does not know its weights, such as a
    server that somebody else started, has to be given the first ones too.
    """

    policy_version: int
    has_own_memory: bool
    knows_its_weights: bool
    remedy: str

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn. The first request of a handle opens the episode."""
        ...

    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        """Work until at least one submitted turn is complete and return all that are; empty if nothing is submitted, or
        `until` turned true first: it is asked between steps, and the turns under way go on at the next call.
        """
        ...

    def release(self, episode: EpisodeHandle) -> None:
        """Forget an episode whose last turn was returned."""
        ...

    def refresh(self, model: PreTrainedModel, policy_version: int) -> None:
        """Generate with the weights of `model` from the next submitted turn on; no turn is under way. FixedWeights
        where the engine can take none.
        """
        ...

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob (nats, temperature 1, nothing cut) of every token but the first of each sequence."""
        ...

    def sleep(self) -> None:
        """Leave memory to the trainer until the next refresh, where the two share a device; no turn is under way."""
        ...

    def counts(self) -> dict[str, float]:
        """Running totals for the log, such as hits of the prefix cache and restarts; empty where there are none."""
        ...

    def close(self) -> None:
        """Give back what the engine holds: processes, memory, connections."""
        ...
