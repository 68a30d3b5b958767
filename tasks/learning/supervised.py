"""Supervised fine-tuning on whole conversations: every assistant token of a demonstration learns in one pass.

Tool replies and prompts are attended to and carry no loss: the same mask as in GRPO.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel

from tasks.learning.batching import Row, micro_batches
from tasks.learning.options import SupervisedSettings
from tasks.learning.policy import Optimizer, token_logp


def fine_tune(
    model: PreTrainedModel,
    rows: Sequence[Row],
    settings: SupervisedSettings,
    *,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Minimise mean cross-entropy over assistant tokens for `settings.num_steps`, epochs reshuffled from `seed`.

    The mean is over all tokens of an optimizer step. Yields {"step", "loss", "learning_rate", "grad_norm"} after each.
    """
    optimizer = Optimizer(model, settings, num_steps=settings.num_steps)
    order: list[int] = []
    rng = random.Random(f"supervised/{seed}")
    model.train()
    for step in range(1, settings.num_steps + 1):
        while len(order) < settings.batch_size:
            order += rng.sample(range(len(rows)), len(rows))
        chosen, order = order[: settings.batch_size], order[settings.batch_size :]
        batches = micro_batches(
            [rows[index] for index in chosen], rows=(settings.batch_size + 1) // 2, device=model.device
        )
        num_tokens = sum(batch.num_tokens for batch in batches)
        loss = 0.0
        for batch in batches:
            share = -token_logp(model, batch).sum() / num_tokens
            share.backward()
            loss += share.item()
        grad_norm, rate = optimizer.step()
        yield {"step": step, "loss": loss, "learning_rate": rate, "grad_norm": grad_norm}
    model.eval()
