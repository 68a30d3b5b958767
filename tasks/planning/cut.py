"""Memory of one of several trainers: what is cut over them, what each has whole, and what rank 0 has besides.

Weights, their averages, gradients and the reference are cut. A layer is whole while it is computed, and the next one is
on its way; embedding and head are whole through forward and backward. Activations are of a rank's own micro-batch, so
an episode, which no rank shares with another, must fit one card. Measured on no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tasks.planning.parts import Part
from tasks.planning.setup import Setup, num_bytes

FLOAT = 4
CUT = ("weights", "adapter", "optimizer", "reference", "gradients")
IN_FLIGHT = 2  # layers: one that is computed, one that is gathered
# On processors all ranks of a machine share its memory; these are rank 0's alone.
OF_RANK_0 = ("engine's weights", "engine's workspace", "keys and values", "copies to play with", "checkpoint")
GATHERED, COPY = "layers in one piece", "rank 0's whole policy"


def of_rank_0(parts: Sequence[Part], setup: Setup, *, trained: float) -> list[Part]:
    """The parts of one trainer as those of rank 0, which has the most; `trained` weights. On a processor of all ranks
    that a command starts there.
    """
    launch = setup.settings.launch
    cut = [_cut(part, setup, trained) if part.name in CUT else part for part in parts]
    size, gradient = _gathered(setup)
    cut.append(Part(GATHERED, size, size + gradient, 0))
    if launch.launcher == "torchrun" and not setup.machine.is_gpu:
        cut = [part if part.name in OF_RANK_0 else _times(part, launch.num_trainers) for part in cut]
    return [*cut, *(Part(COPY, *sizes) for sizes in _copy(setup))]


def _cut(part: Part, setup: Setup, trained: float) -> Part:
    """Trained weights are cut in float32 and are the optimizer's masters themselves (`learning/shared/sharding.py`)."""
    num_ranks, lora = setup.settings.launch.num_trainers, setup.settings.train.lora
    share = 1 / num_ranks
    if setup.settings.compute.weights == "bfloat16":
        if part.name == ("adapter" if lora else "weights"):
            share *= FLOAT / num_bytes("bfloat16")
        if part.name == "optimizer":
            share *= 1 - FLOAT * trained / part.update if part.update else 1
    return replace(part, rollout=share * part.rollout, update=share * part.update, save=share * part.save)


def _gathered(setup: Setup) -> tuple[float, float]:
    """Bytes of weights, and of their gradients before each rank has its part."""
    shape, lora = setup.shape, setup.settings.train.lora
    inside = shape.linear_parameters + shape.expert_parameters
    layer, ends = inside / shape.num_layers, shape.num_parameters - inside
    size = num_bytes(setup.base_dtype)
    return size * (IN_FLIGHT * layer + ends), 0 if lora else FLOAT * (layer + ends)


def _copy(setup: Setup) -> Iterator[tuple[float, float, float, float]]:
    """In the device's memory where an engine generates with it there, else in the host's."""
    size = setup.base_bytes
    if not setup.machine.is_gpu or (setup.shares_the_device and not setup.is_vllm):
        yield size, size, size, 0
    else:
        yield 0, 0, 0, size


def _times(part: Part, count: int) -> Part:
    """Only rank 0 plays, so what playing needs is there once."""
    playing = part.rollout if part.name in ("activations", "logits") else count * part.rollout
    return replace(part, rollout=playing, update=count * part.update, save=count * part.save)
