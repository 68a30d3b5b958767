"""One version of a policy's weights, as a trainer gives it to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from tasks.models.differences import Tolerance


@dataclass(frozen=True, slots=True)
class Probe:
    """What whoever has these weights is to find: `logp` (nats, of every token but the first) of `sequences`, by the
    trainer's own forward, each within `tolerance`.
    """

    sequences: Sequence[list[int]]
    logp: list[list[float]]
    tolerance: Tolerance


@dataclass(frozen=True, slots=True)
class PolicyWeights:
    """`model` has the architecture, the config and any adapter inside it; an engine in its memory uses it.

    `tensors()` yields every tensor of this version by the model's plain name, one at a time: one with an adapter merged
    in is made when it is asked for. Tied tensors come under each of their names. `save_adapter` writes the adapter as
    PEFT does, where there is one: it is far less to send than the tensors. An engine of several copies holds each to
    `probe`. `device` is the trainer's, where the tensors wait in host memory: several ranks' policy in one piece.
    """

    model: PreTrainedModel
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    save_adapter: Callable[[Path], None] | None = None
    probe: Probe | None = None
    device: torch.device | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> PolicyWeights:
        """The weights of a model without an adapter."""
        return cls(model, lambda: ((name, tensor.detach()) for name, tensor in model.state_dict().items()))


class AdapterShape(Protocol):
    """What an engine must know of LoRA adapters before the first; `target_modules` is `all-linear` or names."""

    @property
    def rank(self) -> int: ...

    @property
    def target_modules(self) -> str | list[str]: ...
