"""Supervised fine-tuning on whole conversations: all assistant tokens of a demonstration in one pass.

Prompts and tool replies are read and carry no loss: the same rows, packing and mask as in GRPO.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared.agreement import prepare_model
from tasks.learning.shared.batching import MicroBatch, Row, micro_batches
from tasks.learning.shared.optimizer import Optimizer
from tasks.learning.shared.policy import prepare_for_gradients, token_logp
from tasks.learning.shared.reference import copy_tensors, unique_tensors
from tasks.learning.shared.settings import SupervisedSettings


class NotFinite(ValueError):
    """A step was not taken: its gradient was not finite."""


class SupervisedTrainer:
    """Minimises the mean cross-entropy over the assistant tokens of each step; epochs are shuffled from `seed`.

    `tensors` and `state` are its whole state after any step; `load` restores it bitwise. `held_out` rows are measured
    and never trained on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        settings: SupervisedSettings,
        *,
        seed: int,
        held_out: Sequence[Row] = (),
    ):
        self.model, self.rows, self.settings, self.seed, self.held_out = model, rows, settings, seed, held_out
        prepare_model(model, settings, max_tokens=max(len(row.token_ids) for row in (*rows, *held_out)))
        self.optimizer = Optimizer(model, settings, num_steps=settings.num_steps)
        self.epoch = 0
        self.order: list[int] = []

    def step(self) -> dict[str, Any]:
        batches = self._batches(self._next_rows())
        num_tokens = sum(batch.num_tokens for batch in batches)
        prepare_for_gradients(self.model)
        loss = 0.0
        for batch in batches:
            share = -token_logp(self.model, batch, autocast=self.settings.autocast).sum() / num_tokens
            share.backward()
            loss += share.item()
        self.model.eval()
        done = self.optimizer.step(position=self.optimizer.steps_done)
        number = self.optimizer.steps_done
        if not done.is_finite:
            raise NotFinite(
                f"the gradient at optimizer step {number} of the warm start is not finite ({done.grad_norm}), so the "
                f"step would destroy the weights. They are unchanged. Set warm_start.learning_rate lower and run again."
            )
        return {"step": number, "loss": loss, "learning_rate": done.learning_rate, "grad_norm": done.grad_norm}

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean cross-entropy over the assistant tokens of the held-out rows; draws no random number."""
        total, num_tokens = 0.0, 0
        for batch in self._batches(self.held_out):
            total -= token_logp(self.model, batch, autocast=self.settings.autocast).double().sum().item()
            num_tokens += batch.num_tokens
        return total / num_tokens

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"policy": unique_tensors(self.model), "optimizer": self.optimizer.tensors()}

    def state(self) -> dict[str, Any]:
        return {"steps_done": self.optimizer.steps_done, "epoch": self.epoch, "order": self.order}

    @torch.no_grad()
    def load(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        copy_tensors(tensors["policy"], unique_tensors(self.model))
        self.optimizer.load_tensors(tensors["optimizer"])
        self.optimizer.steps_done, self.epoch, self.order = state["steps_done"], state["epoch"], state["order"]

    def _batches(self, rows: Sequence[Row]) -> list[MicroBatch]:
        return micro_batches(
            [[row] for row in rows],
            packing=self.settings.packing,
            max_tokens=self.settings.micro_batch_tokens,
            device=self.model.device,
        )

    def _next_rows(self) -> list[Row]:
        """The order of an epoch depends on seed and epoch alone."""
        while len(self.order) < self.settings.batch_size:
            rng = random.Random(f"supervised/{self.seed}/{self.epoch}")
            self.order += rng.sample(range(len(self.rows)), len(self.rows))
            self.epoch += 1
        chosen, self.order = self.order[: self.settings.batch_size], self.order[self.settings.batch_size :]
        return [self.rows[index] for index in chosen]
