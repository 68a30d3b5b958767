"""Micro-batches side by side where a matrix product is too small for two threads.

Each lane has its part of torch's threads, so the products of two micro-batches run at once instead of one after the
other, and so does what torch computes alone (indices, small sums, Python). Results are taken in the order of the
micro-batches, whichever lane is first: gradients are added up in one order, and equal seeds give equal bits.
infra/decisions/0082.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared.batching import MicroBatch
from tasks.learning.shared.optimizer import Optimizer
from tasks.learning.shared.policy import LogProbs
from tasks.learning.shared.ranks import Ranks
from tasks.models.torch_setup import start_threads

NUM_LANES = 2
MOST_BYTES = 32 << 20  # of weights; every lane has gradients of its own
MOST_UNEVEN = 1.25  # the largest micro-batch, of an even one: else a lane waits, and all threads for each are faster

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lanes:
    """`count` threads that compute micro-batches: 1 where several ranks train, on a GPU, of a larger model, and with
    one thread. Params decide; nothing is timed.
    """

    def __init__(self, model: PreTrainedModel, *, num_threads: int, ranks: Ranks):
        size = sum(item.numel() * item.element_size() for item in model.parameters())
        is_small = model.device.type == "cpu" and ranks.size == 1 and size <= MOST_BYTES
        self.count = NUM_LANES if is_small and num_threads >= NUM_LANES else 1
        self.threads = start_threads(self.count, num_threads // self.count, name="lane") if self.count > 1 else []

    def logps(self, log_probs: LogProbs, batches: Sequence[MicroBatch], **drawn: Any) -> list[Tensor]:
        """The log-probs of every micro-batch, [M] each, without gradient; `drawn` as for `LogProbs`."""

        @torch.no_grad()
        def compute(batch: MicroBatch) -> Tensor:
            logp_M: Tensor = log_probs(batch, **drawn)
            return logp_M

        return list(self._map(compute, batches)) if self.fit(batches) else [compute(batch) for batch in batches]

    def add_gradients(
        self, loss: Callable[[int], Tensor], batches: Sequence[MicroBatch], *, optimizer: Optimizer
    ) -> None:
        """Those of `loss(number)`, a scalar, of each micro-batch, to what the optimizer has accumulated."""
        numbers = range(len(batches))
        if not self.fit(batches):
            for number in numbers:
                loss(number).backward()
            return

        def gradients(number: int) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(loss(number), optimizer.parameters, allow_unused=True)

        for found in self._map(gradients, numbers):
            optimizer.add(found)

    def fit(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether they are of even size, and more than one."""
        sizes = [batch.ids_BT.numel() for batch in batches]
        return min(self.count, len(sizes)) > 1 and max(sizes) * len(sizes) <= MOST_UNEVEN * sum(sizes)

    def _map(self, compute: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        results = [self.threads[number % self.count].submit(compute, item) for number, item in enumerate(items)]
        return (result.result() for result in results)
