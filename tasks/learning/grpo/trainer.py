"""GRPO: groups of trajectories, their advantages, a loss chosen in params, and a reference that follows the policy.

Read `plain_grpo.py` first. `collect` returns scored groups; the trainer never sees an environment. One iteration is one
batch of rollouts and its optimizer steps: `updates_per_batch` passes of `steps_per_batch` steps, each over whole
groups. The very first is on-policy. The train stage decides when to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.core.records import Group
from tasks.learning.grpo.credit import carries_loss, group_credit, has_signal
from tasks.learning.grpo.exploration import temperature_at, top_p_at
from tasks.learning.grpo.losses import (
    aggregation_weights,
    cispo_loss,
    gspo_loss,
    importance_weights,
    is_clipped,
    kl_estimate,
    ppo_loss,
    sequence_means,
)
from tasks.learning.grpo.metrics import (
    Metrics,
    StepSums,
    exploration_metrics,
    mismatch_metrics,
    pass_metrics,
    rollout_metrics,
)
from tasks.learning.grpo.mini_batches import MiniBatch, mini_batches
from tasks.learning.shared.agreement import prepare_model
from tasks.learning.shared.batching import MicroBatch, Row, check_tokens, micro_batches
from tasks.learning.shared.lora import POLICY, Adapter
from tasks.learning.shared.optimizer import Optimizer
from tasks.learning.shared.policy import prepare_for_gradients, token_logp
from tasks.learning.shared.reference import Reference, copy_tensors, unique_tensors
from tasks.learning.shared.settings import GRPOSettings
from tasks.models.settings import ComputeSettings

NamedTensors = dict[str, dict[str, Tensor]]


class Collect(Protocol):
    def __call__(self, iteration: int, round_number: int, num_problems: int) -> Sequence[Group]: ...


@dataclass(slots=True)
class _Batch:
    """A micro-batch with its token weights and reference; after the first step also that step's log-probs."""

    tensors: MicroBatch
    weight_M: Tensor
    reference_logp_M: Tensor | None
    old_logp_M: Tensor | None = None


class GRPOTrainer:
    """The policy, its reference and the optimizer. `tensors` and `state` are its whole state; `load` restores it
    bitwise.

    `max_tokens` is the most an episode may have. ValueError where its log-probs would differ from the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: GRPOSettings,
        *,
        compute: ComputeSettings,
        temperature: float,
        max_tokens: int,
        adapter: Adapter | None = None,
    ):
        self.model, self.settings, self.adapter = model, settings, adapter
        self.temperature = self.usual_temperature = temperature
        self.top_p = 1.0
        self.reference = Reference(model, adapter, frozen=compute.frozen) if settings.kl_weight else None
        self.steps_per_iteration = settings.updates_per_batch * settings.steps_per_batch
        self.optimizer = Optimizer(
            model,
            settings,
            num_steps=settings.num_iterations * self.steps_per_iteration,
            is_offloaded=compute.offload == "optimizer",
        )
        prepare_model(model, settings, max_tokens=max_tokens)
        self.clip = {"low": settings.clip_low, "high": settings.clip_high}
        self.iteration = 0
        self.last_groups: Sequence[Group] = []

    def iterate(self, collect: Collect, *, before_update: Callable[[], None] = lambda: None) -> Metrics:
        """Collect the next batch with the current policy, take its optimizer steps, and return the row of metrics.

        `before_update` is called when the batch is complete: an engine on the same device can then free memory.
        """
        self.iteration += 1
        self.temperature = temperature_at(self.settings, self.iteration, otherwise=self.usual_temperature)
        self.top_p = top_p_at(self.settings, self.iteration)
        self.model.eval()
        groups, num_replaced = self.collect_with_signal(self.iteration, collect)
        check_tokens(groups, vocabulary_size=self.model.get_input_embeddings().num_embeddings)
        self.last_groups = groups
        before_update()
        parts = [self._micro_batches(part) for part in self._mini_batches(groups)]
        passes = self._update(parts)
        self.model.eval()
        self._move_reference()
        return {
            "iteration": self.iteration,
            "optimizer_steps": self.optimizer.steps_done,
            **rollout_metrics([group for group in groups if group.round_number == 0]),
            "num_replaced_groups": num_replaced,
            **exploration_metrics(self.settings, self.iteration, self.temperature, self.top_p),
            **(self._step_metrics(passes, [batch for part in parts for batch in part]) if parts else {}),
        }

    def tensors(self) -> NamedTensors:
        parts = {"policy": self._policy_tensors(), "optimizer": self.optimizer.tensors()}
        return parts | ({"reference": self.reference.tensors()} if self.reference else {})

    def state(self) -> dict[str, Any]:
        optimizer = self.optimizer
        return {"iteration": self.iteration, "steps_done": optimizer.steps_done, "rate_scale": optimizer.rate_scale}

    @torch.no_grad()
    def load(self, tensors: NamedTensors, state: dict[str, Any]) -> None:
        copy_tensors(tensors["policy"], self._policy_tensors())
        self.optimizer.load_tensors(tensors["optimizer"])
        if self.reference is not None:
            copy_tensors(tensors["reference"], self.reference.tensors())
        self.iteration, self.optimizer.steps_done = state["iteration"], state["steps_done"]
        self.optimizer.rate_scale = state["rate_scale"]

    @torch.no_grad()
    def roll_back(self, policy: dict[str, Tensor], *, step_factor: float) -> None:
        """Restore earlier weights, also as reference, and take smaller steps. Iterations count on, so no draw
        repeats.
        """
        copy_tensors(policy, self._policy_tensors())
        if self.reference is not None:
            self.reference.follow(1.0)
        self.optimizer.start_over()
        self.optimizer.rate_scale *= step_factor

    def _policy_tensors(self) -> dict[str, Tensor]:
        return unique_tensors(self.model) if self.adapter is None else self.adapter.tensors(POLICY)

    def collect_with_signal(self, iteration: int, collect: Collect) -> tuple[list[Group], int]:
        """The batch, with groups of equal rewards replaced by fresh ones (DAPO, arXiv:2503.14476 section 3.2), and
        how many.
        """
        wanted = self.settings.problems_per_iteration
        groups = list(collect(iteration, 0, wanted))
        num_replaced = 0
        for round_number in range(1, self.settings.max_replacement_rounds + 1):
            missing = wanted - sum(has_signal(group, self.settings) for group in groups)
            if missing <= 0:
                break
            groups += collect(iteration, round_number, missing)
            num_replaced += missing
        return groups, num_replaced

    def _mini_batches(self, groups: Sequence[Group]) -> list[MiniBatch]:
        rows, dropped_lengths = self._divide(groups)
        return mini_batches(rows, dropped_lengths, num_steps=self.settings.steps_per_batch)

    def _micro_batches(self, part: MiniBatch) -> list[_Batch]:
        """What one optimizer step computes, with the denominators of this step alone."""
        settings = self.settings
        batches = micro_batches(
            part.rows, packing=settings.packing, max_tokens=settings.micro_batch_tokens, device=self.model.device
        )
        lengths = [batch.length_S for batch in batches]
        weight_S = aggregation_weights(
            torch.cat([*lengths, lengths[0].new_tensor(part.dropped_lengths)]),
            aggregation=settings.aggregation,
            constant_length=settings.constant_length,
        ).float()
        counts = [len(length_S) for length_S in lengths]
        weights = weight_S[: sum(counts)].split(counts)
        references: Sequence[Tensor | None] = [None] * len(batches)
        if self.reference is not None:
            references = self.reference.logps(batches, temperature=self.temperature, autocast=settings.autocast)
        return [
            _Batch(batch, weight_S[batch.trajectory_M], reference_logp_M)
            for batch, weight_S, reference_logp_M in zip(batches, weights, references, strict=True)
        ]

    def _divide(self, groups: Sequence[Group]) -> tuple[list[list[Row]], list[list[int]]]:
        """The rows of each group that carries loss, and the sampled tokens of each trajectory of each dropped group.

        Dropped groups count in the denominator: else the gradient would grow as groups become equal. Replaced groups
        are no part of the batch (DAPO). With `zero_variance_groups: keep` equal groups carry their KL.
        """
        last_round = max((group.round_number for group in groups), default=0)
        rows: list[list[Row]] = []
        dropped_lengths: list[list[int]] = []
        for group in groups:
            advantages = group_credit(group, self.settings)
            triples = zip(group.trajectories, advantages, carries_loss(group, self.settings), strict=True)
            counted = [Row.of(item, advantage) for item, advantage, is_counted in triples if is_counted]
            if counted and (any(map(np.any, advantages)) or self.settings.zero_variance_groups == "keep"):
                rows.append(counted)
            elif group.round_number == last_round:
                dropped_lengths.append([sum(row.sampled_mask) for row in counted])
        return rows, dropped_lengths

    def _update(self, parts: Sequence[Sequence[_Batch]]) -> list[list[Metrics]]:
        """Pass over the batch, one optimizer step per part; the metrics of each step of each pass.

        Ratios are to the weights before the first step. The first part notes its log-probs in that step itself.
        """
        if not parts:
            return []
        for part in parts[1:]:
            self._note_old_logps(part)
        self.optimizer.load_to_device()
        passes = [
            [
                self._optimizer_step(part, pass_number * self.settings.steps_per_batch + number)
                for number, part in enumerate(parts)
            ]
            for pass_number in range(self.settings.updates_per_batch)
        ]
        self.optimizer.offload()
        return passes

    @torch.no_grad()
    def _note_old_logps(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            batch.old_logp_M = self._policy_logp(batch)

    def _policy_logp(self, batch: _Batch) -> Tensor:
        drawn = {"temperature": self.temperature, "top_p": self.top_p}
        return token_logp(self.model, batch.tensors, **drawn, autocast=self.settings.autocast)

    def _optimizer_step(self, batches: Sequence[_Batch], number: int) -> Metrics:
        """Step `number` of the iteration, from 0; the schedule also counts steps that iterations did not take."""
        prepare_for_gradients(self.model)
        sums = StepSums(sum(batch.tensors.num_tokens for batch in batches))
        for batch in batches:
            loss = self._loss(batch, sums)
            loss.backward()
            sums.loss += loss.item()
        position = (self.iteration - 1) * self.steps_per_iteration + number
        step = self.optimizer.step(position=position, is_loss_finite=math.isfinite(sums.loss))
        return {
            **sums.metrics(),
            "grad_norm": step.grad_norm if math.isfinite(step.grad_norm) else None,
            "learning_rate": step.learning_rate,
            "non_finite": not step.is_finite,
        }

    def _loss(self, batch: _Batch, sums: StepSums) -> Tensor:
        settings, tensors = self.settings, batch.tensors
        policy_logp_M = self._policy_logp(batch)
        if batch.old_logp_M is None:
            batch.old_logp_M = policy_logp_M.detach()
        loss_M = self._policy_loss(policy_logp_M, batch.old_logp_M, tensors)
        if settings.importance_correction != "none":
            loss_M = loss_M * importance_weights(
                batch.old_logp_M,
                tensors.sampler_logp_M,
                tensors.trajectory_M,
                correction=settings.importance_correction,
                cap=settings.importance_cap,
            )
        if batch.reference_logp_M is not None:
            kl_M = kl_estimate(policy_logp_M, batch.reference_logp_M, estimator=settings.kl_estimator)
            loss_M = loss_M + settings.kl_weight * kl_M
            sums.kl += kl_M.detach().sum().item()
        self._watch(policy_logp_M.detach(), batch.old_logp_M, tensors, sums)
        return (loss_M * batch.weight_M).sum()

    def _policy_loss(self, policy_logp_M: Tensor, old_logp_M: Tensor, tensors: MicroBatch) -> Tensor:
        if self.settings.loss == "gspo":
            return gspo_loss(policy_logp_M, old_logp_M, tensors.advantage_M, tensors.trajectory_M, **self.clip)
        loss = ppo_loss if self.settings.loss == "ppo" else cispo_loss
        return loss(policy_logp_M, old_logp_M, tensors.advantage_M, **self.clip)

    def _watch(self, policy_logp_M: Tensor, old_logp_M: Tensor, tensors: MicroBatch, sums: StepSums) -> None:
        difference_M = policy_logp_M - old_logp_M
        if self.settings.loss == "gspo":
            difference_M = sequence_means(difference_M, tensors.trajectory_M)
        is_clipped_M = is_clipped(difference_M, torch.zeros_like(difference_M), tensors.advantage_M, **self.clip)
        sums.clipped += is_clipped_M.sum().item()
        sums.ratio_max = max(sums.ratio_max, difference_M.max().exp().item())

    def _step_metrics(self, passes: Sequence[Sequence[Metrics]], batches: Sequence[_Batch]) -> Metrics:
        old = torch.cat([batch.old_logp_M for batch in batches if batch.old_logp_M is not None])
        sampler = torch.cat([batch.tensors.sampler_logp_M for batch in batches])
        non_finite = any(step["non_finite"] for steps in passes for step in steps)
        return {**pass_metrics(passes[-1]), "non_finite": non_finite, **mismatch_metrics(old, sampler)}

    def _move_reference(self) -> None:
        interval = self.settings.reference_interval
        if self.reference is not None and interval is not None and self.iteration % interval == 0:
            self.reference.follow(self.settings.reference_mix)
