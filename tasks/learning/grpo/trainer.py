"""GRPO: groups of trajectories, their advantages, a loss chosen in params, and a reference that follows the policy.

Read `plain_grpo.py` first. `collect` returns scored groups; the trainer never sees an environment. One iteration is one
batch of rollouts and its optimizer steps: `updates_per_batch` passes of `steps_per_batch` steps, each over whole
groups. The very first is on-policy. The train stage decides when to stop. With several ranks, rank 0 collects and all
update: each computes its share of every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.core.records import Group, Metrics
from tasks.learning.grpo.credit import has_signal
from tasks.learning.grpo.entropy import mean_entropy
from tasks.learning.grpo.exploration import draws_by_schedule, temperature_at, top_p_at
from tasks.learning.grpo.metrics import (
    StepSums,
    exploration_metrics,
    mismatch_metrics,
    pass_metrics,
    rollout_metrics,
    step_metrics,
)
from tasks.learning.grpo.mini_batches import MiniBatch, divide, mini_batches, oldest_version
from tasks.learning.grpo.step_loss import LossBatch, batch_loss, loss_batches, note_references
from tasks.learning.shared.agreement import check_engine, prepare_model, trainer_logp
from tasks.learning.shared.batching import own_share
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.lora import Adapter
from tasks.learning.shared.optimizer import Optimizer
from tasks.learning.shared.policy import LogProbs, prepare_for_gradients
from tasks.learning.shared.ranks import ALONE, Ranks, on_all_ranks
from tasks.learning.shared.reference import Reference, trained_tensors
from tasks.learning.shared.rows import check_tokens
from tasks.learning.shared.settings import GRPOSettings
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
from tasks.models.differences import Tolerance
from tasks.models.settings import ComputeSettings


class Collect(Protocol):
    def __call__(self, iteration: int, round_number: int, num_problems: int) -> Sequence[Group]: ...


class GRPOTrainer:
    """The policy, its reference and the optimizer. `load` restores `tensors` and `state`, its whole state, bitwise.

    `max_tokens` is the most an episode may have. ValueError where its log-probs would differ from the model's own. With
    several ranks all have this trainer of equal weights; rank 0 calls its methods, and the others are in `follow`.
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
        ranks: Ranks = ALONE,
    ):
        self.model, self.settings, self.adapter, self.ranks = model, settings, adapter, ranks
        self.temperature = self.usual_temperature = temperature
        self.top_p = 1.0
        self.log_probs = LogProbs(model)
        self.reference = None
        if settings.kl_weight:
            self.reference = Reference(self.log_probs, adapter, frozen=compute.frozen, ranks=ranks)
        prepare_model(model, settings, max_tokens=max_tokens)
        self.lanes = Lanes(model, num_threads=compute.num_threads, num_ranks=ranks.size)
        self.dtypes = {name: tensor.dtype for name, tensor in self._policy_tensors().items()}
        computes_in = computed_dtype(compute.weights, ranks)
        shard(self.log_probs, ranks, computes_in=computes_in)
        self.steps_per_iteration = settings.updates_per_batch * settings.steps_per_batch
        self.optimizer = Optimizer(
            model,
            settings,
            num_steps=settings.num_iterations * self.steps_per_iteration,
            is_offloaded=compute.offload == "optimizer",
            computes_in=computes_in,
        )
        self.iteration = 0
        self.last_groups: Sequence[Group] = []

    def iterate(self, collect: Collect, *, before_update: Callable[[], None] = lambda: None) -> Metrics:
        """Collect the next batch with the current policy, take its optimizer steps, and return the row of metrics.

        `before_update` is called when the batch is complete: an engine on the same device can then free memory.
        """
        self._begin(self.iteration + 1)
        groups, num_replaced = self.collect_with_signal(self.iteration, collect)
        check_tokens(groups, vocabulary_size=self.model.get_input_embeddings().num_embeddings)
        self.last_groups = groups
        before_update()
        of_steps = self.update(self.iteration, groups)
        first = [group for group in groups if group.round_number == 0]
        return {
            "iteration": self.iteration,
            "optimizer_steps": self.optimizer.steps_done,
            **rollout_metrics(first, self.settings, oldest_version(self.settings, self.iteration)),
            "num_replaced_groups": num_replaced,
            **exploration_metrics(self.settings, self.iteration, self.temperature, self.top_p),
            **of_steps,
        }

    def follow(self) -> None:
        """On every rank but 0: take part in each step until rank 0 ends."""
        self.ranks.follow(self)

    @on_all_ranks
    def update(self, iteration: int, groups: Sequence[Group]) -> Metrics:
        """Take the optimizer steps of a batch, and move the reference where that is due."""
        self._begin(iteration)
        entropy = self._entropy(groups) if draws_by_schedule(self.settings) else {}
        parts = [self._micro_batches(part) for part in self._mini_batches(groups)]
        passes = self._update(parts)
        self.model.eval()
        self._move_reference()
        return entropy | (self._step_metrics(passes, [batch for part in parts for batch in part]) if parts else {})

    @on_all_ranks
    def logp_of(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob (nats, temperature 1) of every token but the first, by the forward that is trained."""
        return trainer_logp(self.log_probs, sequences, self.settings)

    @on_all_ranks
    def check_engine(
        self, groups: Sequence[Group], policy_version: int, drawn: dict[str, float], most: Tolerance
    ) -> bool:
        """Return False where there is nothing to compare; ValueError where the engine's log-probs differ by more."""
        return check_engine(
            self.log_probs, groups, self.settings, policy_version=policy_version, **drawn, tolerance=most
        )

    @on_all_ranks
    def tensors(self) -> NamedTensors:
        """Whole tensors; where they are cut over the ranks, copies in host memory, on rank 0."""
        parts = {"policy": self._whole_policy(), "optimizer": gather_whole(self.optimizer.tensors(), self.ranks)}
        return parts | ({"reference": gather_whole(self.reference.tensors(), self.ranks)} if self.reference else {})

    @on_all_ranks
    def policy_tensors(self) -> dict[str, Tensor]:
        """What is trained, the whole model or its adapter, as `tensors` gives it."""
        return self._whole_policy()

    def _whole_policy(self) -> dict[str, Tensor]:
        return gather_whole(self._policy_tensors(), self.ranks, dtypes=self.dtypes)

    def state(self) -> dict[str, Any]:
        return {"iteration": self.iteration, **self.optimizer.state()}

    def load(self, tensors: NamedTensors, state: dict[str, Any]) -> None:
        self._load(shapes_of(tensors), state, tensors=tensors)

    @on_all_ranks
    @torch.no_grad()
    def _load(self, shapes: Shapes, state: dict[str, Any], *, tensors: NamedTensors | None = None) -> None:
        like = {"policy": self._policy_tensors(), "optimizer": self.optimizer.owners(shapes["optimizer"])}
        like |= {"reference": self.reference.tensors()} if self.reference else {}
        shared = share_whole(shapes, tensors, self.ranks, like=like)
        copy_tensors(shared["policy"], self._policy_tensors())
        self.optimizer.load_tensors(shared["optimizer"])
        if self.reference is not None:
            copy_tensors(shared["reference"], self.reference.tensors())
        self.iteration = state["iteration"]
        self.optimizer.load_state(state)

    def roll_back(self, policy: dict[str, Tensor], *, step_factor: float) -> None:
        """Restore earlier weights, also as reference; take smaller steps. Iterations count on, so no draw repeats."""
        tensors = {"policy": policy}
        self._roll_back(shapes_of(tensors), step_factor, tensors=tensors)

    @on_all_ranks
    @torch.no_grad()
    def _roll_back(self, shapes: Shapes, step_factor: float, *, tensors: NamedTensors | None = None) -> None:
        like = {"policy": self._policy_tensors()}
        copy_tensors(share_whole(shapes, tensors, self.ranks, like=like)["policy"], like["policy"])
        if self.reference is not None:
            self.reference.follow(1.0)
        self.optimizer.start_over()
        self.optimizer.rate_scale *= step_factor

    def _begin(self, iteration: int) -> None:
        self.iteration = iteration
        self.temperature = temperature_at(self.settings, iteration, otherwise=self.usual_temperature)
        self.top_p = top_p_at(self.settings, iteration)
        self.model.eval()

    def _policy_tensors(self) -> dict[str, Tensor]:
        return trained_tensors(self.model, self.adapter)

    def collect_with_signal(self, iteration: int, collect: Collect) -> tuple[list[Group], int]:
        """The batch, groups of equal rewards replaced (DAPO, arXiv:2503.14476 section 3.2), and how many were."""
        wanted = self.settings.problems_per_iteration
        groups = list(collect(iteration, 0, wanted))
        num_replaced = 0
        for round_number in range(1, self.settings.max_replacement_rounds + 1):
            missing = wanted - sum(has_signal(group, self.settings) for group in groups)
            if missing <= 0:
                break
            groups += (replacements := collect(iteration, round_number, missing))
            num_replaced += len(replacements)
        return groups, num_replaced

    def _entropy(self, groups: Sequence[Group]) -> Metrics:
        """In place of the entropy of the tokens as drawn, one at the run's usual temperature: iterations compare."""
        found = mean_entropy(
            self.log_probs,
            [group for group in groups if group.round_number == 0 and not group.is_prefixed],
            self.settings,
            temperature=self.usual_temperature,
            lanes=self.lanes,
            ranks=self.ranks,
        )
        return {"entropy": found}

    def _mini_batches(self, groups: Sequence[Group]) -> list[MiniBatch]:
        with_loss, dropped_lengths = divide(groups, self.settings, iteration=self.iteration)
        return mini_batches(with_loss, dropped_lengths, num_steps=self.settings.steps_per_batch)

    def _micro_batches(self, part: MiniBatch) -> list[LossBatch]:
        """What this rank computes of one optimizer step, with the denominators of this whole step alone."""
        settings = self.settings
        share = own_share(part.rows, settings, device=self.model.device, ranks=self.ranks, lanes=self.lanes)
        batches = loss_batches(share, settings, dropped_lengths=part.dropped_lengths)
        if self.reference is not None:
            note_references(batches, self.reference, lanes=self.lanes, ranks=self.ranks, **self._drawn())
        return batches

    def _update(self, parts: Sequence[Sequence[LossBatch]]) -> list[list[Metrics]]:
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
    def _note_old_logps(self, batches: Sequence[LossBatch]) -> None:
        for batch, logp_M in zip(batches, self.lanes.each(batches, self._policy_logp), strict=True):
            batch.old_logp_M = logp_M

    def _policy_logp(self, batch: LossBatch) -> Tensor:
        return self.log_probs(batch.tensors, **self._drawn())

    def _drawn(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "autocast": self.settings.autocast}

    def _optimizer_step(self, batches: Sequence[LossBatch], number: int) -> Metrics:
        """Step `number` of the iteration, from 0; the schedule also counts steps that iterations did not take."""
        prepare_for_gradients(self.model)
        own = self.lanes.backward(batches, lambda batch: batch_loss(batch, self._policy_logp(batch), self.settings))
        sums = StepSums.over(self.ranks.gather(StepSums.over(own)))
        position = (self.iteration - 1) * self.steps_per_iteration + number
        step = self.optimizer.step(position=position, is_loss_finite=math.isfinite(sums.loss))
        return step_metrics(sums, step)

    def _step_metrics(self, passes: Sequence[Sequence[Metrics]], batches: Sequence[LossBatch]) -> Metrics:
        old = self._over_ranks(torch.cat([batch.old_logp_M for batch in batches if batch.old_logp_M is not None]))
        sampler = self._over_ranks(torch.cat([batch.tensors.sampler_logp_M for batch in batches]))
        non_finite = any(step["non_finite"] for steps in passes for step in steps)
        row = pass_metrics(passes[-1])
        if self.reference is None:
            del row["kl"]  # not measured: 0 would read as a policy that never left its reference
        return {**row, "non_finite": non_finite, **mismatch_metrics(old, sampler)}

    def _over_ranks(self, values_M: Tensor) -> Tensor:
        return torch.cat(self.ranks.gather(values_M.cpu())) if self.ranks.size > 1 else values_M

    def _move_reference(self) -> None:
        interval = self.settings.reference_interval
        if self.reference is not None and interval is not None and self.iteration % interval == 0:
            self.reference.follow(self.settings.reference_mix)
