"""Two threads that compute the micro-batches of one process side by side.

Two threads of torch share a product badly where its matrices are small: 1.37 times the speed of one. So on a CPU each
lane has half of them, and its own share of an optimizer step, which `batching.share_of` deals out as it does over
ranks. A lane adds up its own gradients, and the sums are added in the order of the lanes: no bit depends on which is
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.models.torch_setup import is_small, start_threads

NUM_LANES = 2
MAX_BYTES = 32 << 20  # of weights: larger products keep all of torch's threads busy


class InLane(Protocol):
    """`lane`: which of the lanes computes it, from 0."""

    @property
    def lane(self) -> int: ...


Batch = TypeVar("Batch", bound=InLane)
Found = TypeVar("Found")


class Lanes:
    """`number` is 1 where all is computed in the caller's thread: on a GPU, with several ranks, a large model, one
    thread, or what lanes cannot share (gradient checkpointing, weights with a float32 master).
    """

    def __init__(self, model: PreTrainedModel, *, num_threads: int, num_ranks: int):
        self.parameters = [item for item in model.parameters() if item.requires_grad]
        fits = num_ranks == 1 and num_threads >= NUM_LANES and is_small(model, MAX_BYTES)
        fits = fits and all(item.dtype == torch.float32 for item in self.parameters)
        self.number = NUM_LANES if fits and not getattr(model, "is_gradient_checkpointing", False) else 1
        self.threads = start_threads(self.number, num_threads // NUM_LANES, name="lane") if self.number > 1 else []

    def each(self, batches: Sequence[Batch], compute: Callable[[Batch], Found]) -> list[Found]:
        """`compute` of every batch, in their order; without gradients if the caller computes without."""
        with_gradients = torch.is_grad_enabled()

        def compute_all(numbers: Sequence[int]) -> list[Found]:
            with torch.set_grad_enabled(with_gradients):
                return [compute(batches[number]) for number in numbers]

        lanes = self._numbers(batches)
        found = dict[int, Found]()
        for numbers, results in zip(lanes, self._run(compute_all, lanes), strict=True):
            found.update(zip(numbers, results, strict=True))
        return [found[number] for number in range(len(batches))]

    def backward(self, batches: Sequence[Batch], loss_of: Callable[[Batch], tuple[Tensor, Found]]) -> list[Found]:
        """Add the gradient of every batch's loss to the parameters'; what `loss_of` found beside each, in order."""
        if len(self._numbers(batches)) == 1:
            return [_backward(*loss_of(batch)) for batch in batches]
        sums: list[list[Tensor | None]] = [[None] * len(self.parameters) for _ in range(self.number)]

        def add(batch: Batch) -> Found:
            loss, found = loss_of(batch)
            _add(sums[batch.lane], torch.autograd.grad(loss, self.parameters, allow_unused=True))
            return found

        found = self.each(batches, add)
        for gradients in sums:
            own = [parameter.grad for parameter in self.parameters]
            _add(own, gradients)
            for parameter, gradient in zip(self.parameters, own, strict=True):
                parameter.grad = gradient
        return found

    def _numbers(self, batches: Sequence[Batch]) -> list[list[int]]:
        """Of the batches of each lane that has some."""
        lanes = [[n for n, batch in enumerate(batches) if batch.lane == lane] for lane in range(self.number)]
        return [numbers for numbers in lanes if numbers]

    def _run(self, compute_all: Callable[[Sequence[int]], list[Found]], lanes: list[list[int]]) -> list[list[Found]]:
        """One lane alone in the caller's thread, which has all of torch's; an error only once every lane has ended."""
        if len(lanes) < NUM_LANES:
            return [compute_all(numbers) for numbers in lanes]
        started = [thread.submit(compute_all, numbers) for thread, numbers in zip(self.threads, lanes, strict=True)]
        wait(started)
        return [lane.result() for lane in started]


def _backward(loss: Tensor, found: Found) -> Found:
    loss.backward()
    return found


def _add(sums: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            own = sums[number]
            # Not in place: two parameters may have been given one tensor.
            sums[number] = gradient if own is None else own + gradient
