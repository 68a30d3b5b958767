"""GRPO: groups of trajectories, their advantages, a clipped surrogate, and a reference that follows the policy.

The trainer never sees an environment: it is handed a `collect` callable and gets scored groups back. One iteration is
one batch of rollouts and its μ optimizer steps. Overlong trajectories carry no loss and leave their group's statistics;
groups whose rewards are all equal carry no signal and are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.advantages import group_advantages
from tasks.learning.batching import MicroBatch, Row, micro_batches
from tasks.learning.losses import clip_share, clipped_surrogate, kl_to_reference
from tasks.learning.options import GRPOSettings
from tasks.learning.policy import Optimizer, frozen_copy, token_logp
from tasks.records import Group

Metrics = dict[str, Any]
NOT_COUNTED = ("overlong", "environment_error")


class GRPOTrainer:
    """Holds the policy, its reference and the optimizer; `iterate` does one iteration."""

    def __init__(self, model: PreTrainedModel, settings: GRPOSettings, *, temperature: float):
        self.model, self.settings, self.temperature = model, settings, temperature
        self.optimizer = Optimizer(model, settings, num_steps=settings.num_iterations * settings.mu)
        self.reference = frozen_copy(model) if settings.kl_weight else None
        self.iteration = 0

    def iterate(self, collect: Callable[[int], Sequence[Group]]) -> Metrics:
        """Collect the next batch with the current policy, take μ optimizer steps on it, and report what happened."""
        self.iteration += 1
        groups = collect(self.iteration)
        rows = self._rows_with_signal(groups)
        batches = micro_batches(rows, rows=self.settings.micro_batch_size, device=self.model.device)
        reference_logps = self._reference_logps(batches)
        steps = [self._optimizer_step(batches, reference_logps) for _ in range(self.settings.mu if batches else 0)]
        if self.reference is not None and self.iteration % self.settings.reference_interval == 0:
            self.reference = frozen_copy(self.model)
        return {
            "iteration": self.iteration,
            "optimizer_steps": self.optimizer.steps_done,
            **_group_metrics(groups),
            **(_step_metrics(steps) if steps else {}),
        }

    def _rows_with_signal(self, groups: Sequence[Group]) -> list[Row]:
        reward_NG = torch.tensor([[score.reward for score in group.scores] for group in groups])
        counted = [[trajectory.outcome not in NOT_COUNTED for trajectory in group.trajectories] for group in groups]
        advantage_NG = group_advantages(reward_NG, torch.tensor(counted), scale=self.settings.advantage_scale).tolist()
        return [
            Row.of(trajectory, advantage)
            for group, advantages in zip(groups, advantage_NG, strict=True)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
            if advantage != 0
        ]

    @torch.no_grad()
    def _reference_logps(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        if self.reference is None:
            return [None] * len(batches)
        return [token_logp(self.reference, batch, temperature=self.temperature) for batch in batches]

    def _optimizer_step(self, batches: Sequence[MicroBatch], reference_logps: Sequence[Tensor | None]) -> Metrics:
        """Mean loss over all sampled tokens of the step, so that how rows are cut into micro-batches changes
        nothing.
        """
        settings = self.settings
        num_tokens = sum(batch.num_tokens for batch in batches)
        totals = {"kl": 0.0, "clip_share": 0.0, "sampler_gap": 0.0}
        self.model.train()
        for batch, reference_logp_M in zip(batches, reference_logps, strict=True):
            policy_logp_M = token_logp(self.model, batch, temperature=self.temperature)
            ratio = (policy_logp_M, batch.sampler_logp_M, batch.advantage_M)
            loss_M = clipped_surrogate(*ratio, low=settings.clip_low, high=settings.clip_high)
            if reference_logp_M is not None:
                kl_M = kl_to_reference(policy_logp_M, reference_logp_M)
                loss_M = loss_M + settings.kl_weight * kl_M
                totals["kl"] += kl_M.detach().sum().item() / num_tokens
            (loss_M.sum() / num_tokens).backward()
            with torch.no_grad():
                clipped = clip_share(*ratio, low=settings.clip_low, high=settings.clip_high)
                totals["clip_share"] += clipped.item() / num_tokens
                totals["sampler_gap"] += (policy_logp_M - batch.sampler_logp_M).abs().sum().item() / num_tokens
        self.model.eval()
        grad_norm, rate = self.optimizer.step()
        return {**totals, "grad_norm": grad_norm, "learning_rate": rate}


def _group_metrics(groups: Sequence[Group]) -> Metrics:
    """What the rollouts were like; shares are of trajectories, `signal_share` of groups."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [[score.reward for score in group.scores] for group in groups]
    return {
        "success_rate": sum(trajectory.is_success for trajectory in trajectories) / len(trajectories),
        "mean_reward": sum(map(sum, rewards)) / len(trajectories),
        "mean_sampled_tokens": sum(trajectory.num_sampled_tokens for trajectory in trajectories) / len(trajectories),
        "signal_share": sum(max(group) > min(group) for group in rewards) / len(groups),
        "overlong_share": sum(trajectory.outcome == "overlong" for trajectory in trajectories) / len(trajectories),
    }


def _step_metrics(steps: Sequence[Metrics]) -> Metrics:
    """Of the last of the μ steps, save the sampler gap, which means something only at the first: the policy then still
    is the sampler, so any gap is the engine's and the trainer's arithmetic differing.
    """
    return {**steps[-1], "sampler_gap": steps[0]["sampler_gap"]}
