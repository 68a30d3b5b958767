"""Micro-batches side by side where a matrix product is too small for two threads.

Each lane has its part of torch's threads, so the products of two micro-batches run at once instead of one after the
other, and so does what torch computes alone (indices, small sums, Python). Results are taken in the order of the
micro-batches, whichever lane is first: gradients are added up in one order, and equal seeds give equal bits.
infra/decisions/0082.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
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
    one thread. Params decide; nothing is timed. `max_tokens`: positions that may be computed at once.
    """

    def __init__(self, model: PreTrainedModel, *, num_threads: int, max_tokens: int, ranks: Ranks):
        size = sum(item.numel() * item.element_size() for item in model.parameters())
        is_small = model.device.type == "cpu" and ranks.size == 1 and size <= MOST_BYTES
        self.count = NUM_LANES if is_small and num_threads >= NUM_LANES else 1
        self.max_tokens = max_tokens
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
        """Whether they are of even size, more than one, and as many as there are lanes fit at once."""
        sizes = [batch.ids_BT.numel() for batch in batches]
        if min(self.count, len(sizes)) < 2 or max(sizes) * self.count > self.max_tokens:
            return False
        return max(sizes) * len(sizes) <= MOST_UNEVEN * sum(sizes)

    def _map(self, compute: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """In order. At most one item more than there are lanes is begun and not taken; after an error none runs on."""
        begun = deque[Future[Result]]()
        try:
            for number, item in enumerate(items):
                begun.append(self.threads[number % self.count].submit(compute, item))
                if len(begun) > self.count:
                    yield begun[0].result()
                    begun.popleft()
            while begun:
                yield begun[0].result()
                begun.popleft()
        finally:
            for each in begun:
                each.cancel()
            wait(begun)
