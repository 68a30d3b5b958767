"""The protocol of an engine: token ids in, sampled ids with their log-probs out, one turn of one episode at a time.

Ids are only appended, and an engine keeps what it computed for an episode until release: a tool reply costs its own
tokens only. `submit` never blocks; `poll` works until a turn is complete or the caller has something to add, so no
tool's answer waits for another's turn. Arrival order decides which episodes share a step, never their random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tasks.models.policy_weights import PolicyWeights

EpisodeHandle = int
Finish = Literal["end_of_turn", "stop_string", "length"]


class FixedWeights(ValueError):
    """The engine's weights were chosen elsewhere, and it accepts no others."""


def never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One more turn of an episode: the ids to append (prompt or tool replies), the token limit, the turn's seed.

    `end_ids` complete it too, beside the engine's end-of-turn ids: a thought and its answer are two requests of a turn.
    """

    episode: EpisodeHandle
    token_ids: list[int]
    max_new_tokens: int
    seed: int
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnReply:
    """`token_ids` include end-of-turn; `sampler_logp` (nats) is under the sampling distribution, and `token_versions`
    are of the policy that wrote each; `length`: cut at the limit.
    """

    episode: EpisodeHandle
    token_ids: list[int]
    sampler_logp: list[float]
    finish: Finish
    token_versions: list[int]

    @property
    def policy_version(self) -> int:
        """Of the last token."""
        return self.token_versions[-1]


class Engine(Protocol):
    """Generates turns with the weights of `policy_version`.

    An engine that `has_own_memory` starts from a folder, takes new weights by `refresh`, and may serve another model of
    the same shape; others generate with the model they were built on. A probe checks what it computes; `remedy` says
    what to change in params when that fails. One that does not know its weights, such as an external server, must be
    given the first ones too.
    """

    policy_version: int
    has_own_memory: bool
    knows_its_weights: bool
    remedy: str

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn. The first request of a handle opens the episode."""
        ...

    def poll(self, until: Callable[[], bool] = never) -> list[TurnReply]:
        """The completed turns; empty if none is submitted, or `until`, asked between steps, turned true first."""
        ...

    def release(self, episode: EpisodeHandle) -> None: ...

    def refresh(self, weights: PolicyWeights, policy_version: int) -> None:
        """Use `weights` from the next token on. A turn under way keeps its tokens and their log-probs, and the new
        weights write the rest of it: they compute the episode's keys and values anew, so every recorded log-prob is
        that of the version of its token given all tokens before. No reply is lost or repeated, whether a turn ended
        before, meanwhile or after. FixedWeights where it accepts none.
        """
        ...

    def token_logp(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob (nats, temperature 1, no top-p) of every token but the first of each sequence. Turns under way go on
        after it.
        """
        ...

    def sleep(self) -> None:
        """Free memory for the trainer until the next refresh, where both share a device; no turn is under way."""
        ...

    def counts(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class AdjustableEngine(Engine, Protocol):
    """One in the trainer's memory: it generates with the caller's model, and its temperature and top-p may change
    between batches.
    """

    @property
    def model(self) -> PreTrainedModel:
        """What it generates with."""
        ...

    def set_distribution(self, *, temperature: float, top_p: float) -> None: ...

    def pause(self) -> None:
        """Complete the steps under way and begin none before the next poll: from now until then the model's weights may
        change. Turns under way go on after the refresh.
        """
        ...
