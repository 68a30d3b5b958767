"""Supervised fine-tuning on whole conversations: all assistant tokens of a demonstration in one pass.

Prompts and tool replies are read and carry no loss: the same rows, packing and mask as in GRPO. With several ranks,
each computes its share of every step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared.agreement import prepare_model
from tasks.learning.shared.batching import MicroBatch, Share, own_share
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.optimizer import Optimizer, Step
from tasks.learning.shared.policy import LogProbs, prepare_for_gradients
from tasks.learning.shared.ranks import ALONE, Ranks, on_all_ranks
from tasks.learning.shared.reference import unique_tensors
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import SupervisedSettings
from tasks.learning.shared.sharding import (
    NamedTensors,
    Shapes,
    computed_dtype,
    copy_tensors,
    gather_whole,
    shapes_of,
    shard,
    share_whole,
)


class NotFinite(ValueError):
    """A step was not taken: its gradient was not finite."""


class SupervisedTrainer:
    """Minimises the mean cross-entropy over the assistant tokens of each step; epochs are shuffled from `seed`.

    `tensors` and `state` are its whole state after any step; `load` restores it bitwise. `held_out` rows are measured
    and never trained on. With several ranks all have this trainer, with equal weights and rows; rank 0 calls its
    methods, and the others are in `follow`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        settings: SupervisedSettings,
        *,
        seed: int,
        held_out: Sequence[Row] = (),
        ranks: Ranks = ALONE,
    ):
        self.model, self.rows, self.settings, self.seed, self.held_out = model, rows, settings, seed, held_out
        self.ranks = ranks
        prepare_model(model, settings, max_tokens=max(len(row.token_ids) for row in (*rows, *held_out)))
        self.dtypes = {name: tensor.dtype for name, tensor in unique_tensors(model).items()}
        self.log_probs = LogProbs(model)
        self.lanes = Lanes(model, num_threads=torch.get_num_threads(), num_ranks=ranks.size)
        computes_in = computed_dtype("bfloat16" if model.dtype == torch.bfloat16 else "float32", ranks)
        shard(self.log_probs, ranks, computes_in=computes_in)
        self.optimizer = Optimizer(model, settings, num_steps=settings.num_steps, computes_in=computes_in)
        self.epoch = 0
        self.order: list[int] = []

    def step(self) -> dict[str, Any]:
        loss, done = self._take_step()
        number = self.optimizer.steps_done
        if not done.is_finite:
            raise NotFinite(
                f"the gradient at optimizer step {number} of the warm start is not finite ({done.grad_norm}), so the "
                f"step would destroy the weights. They are unchanged. Set warm_start.learning_rate lower and run again."
            )
        return {"step": number, "loss": loss, "learning_rate": done.learning_rate, "grad_norm": done.grad_norm}

    def follow(self) -> None:
        """On every rank but 0: take part in each step until rank 0 ends."""
        self.ranks.follow(self)

    @on_all_ranks
    def _take_step(self) -> tuple[float, Step]:
        share = self._share(self._next_rows())
        num_tokens = sum(share.episode_lengths)
        prepare_for_gradients(self.model)

        def loss_of(batch: MicroBatch) -> tuple[Tensor, float]:
            loss = -self._logp(batch).sum() / num_tokens
            return loss, loss.item()

        losses = self.lanes.backward(share.batches, loss_of)
        self.model.eval()
        return sum(self.ranks.gather(sum(losses))), self.optimizer.step(position=self.optimizer.steps_done)

    @on_all_ranks
    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean cross-entropy over the assistant tokens of the held-out rows; draws no random number."""
        share = self._share(self.held_out)
        num_tokens = sum(share.episode_lengths)
        own = -sum(logp_M.double().sum().item() for logp_M in self.lanes.each(share.batches, self._logp))
        return sum(self.ranks.gather(own)) / num_tokens

    @on_all_ranks
    def tensors(self) -> NamedTensors:
        """Whole tensors; where they are cut over the ranks, copies in host memory, on rank 0."""
        return {"policy": self._whole_policy(), "optimizer": gather_whole(self.optimizer.tensors(), self.ranks)}

    @on_all_ranks
    def policy_tensors(self) -> dict[str, Tensor]:
        """The model's, as `tensors` gives them."""
        return self._whole_policy()

    def state(self) -> dict[str, Any]:
        return {"steps_done": self.optimizer.steps_done, "epoch": self.epoch, "order": self.order}

    def load(self, tensors: NamedTensors, state: dict[str, Any]) -> None:
        """`tensors` and `state` of before; other tensors beside them are not read."""
        own = {part: tensors[part] for part in ("policy", "optimizer")}
        self._load(shapes_of(own), state, tensors=own)

    @on_all_ranks
    @torch.no_grad()
    def _load(self, shapes: Shapes, state: dict[str, Any], *, tensors: NamedTensors | None = None) -> None:
        like = {"policy": unique_tensors(self.model), "optimizer": self.optimizer.owners(shapes["optimizer"])}
        shared = share_whole(shapes, tensors, self.ranks, like=like)
        copy_tensors(shared["policy"], like["policy"])
        self.optimizer.load_tensors(shared["optimizer"])
        self.optimizer.steps_done, self.epoch = state["steps_done"], state["epoch"]
        self.order = [*state["order"]]

    def _whole_policy(self) -> dict[str, Tensor]:
        return gather_whole(unique_tensors(self.model), self.ranks, dtypes=self.dtypes)

    def _logp(self, batch: MicroBatch) -> Tensor:
        return self.log_probs(batch, temperature=1.0, autocast=self.settings.autocast)

    def _share(self, rows: Sequence[Row]) -> Share:
        groups = [[row] for row in rows]
        return own_share(groups, self.settings, device=self.model.device, ranks=self.ranks, lanes=self.lanes)

    def _next_rows(self) -> list[Row]:
        """The order of an epoch depends on seed and epoch alone."""
        while len(self.order) < self.settings.batch_size:
            rng = random.Random(f"supervised/{self.seed}/{self.epoch}")
            self.order += rng.sample(range(len(self.rows)), len(self.rows))
            self.epoch += 1
        chosen, self.order = self.order[: self.settings.batch_size], self.order[self.settings.batch_size :]
        return [self.rows[index] for index in chosen]
