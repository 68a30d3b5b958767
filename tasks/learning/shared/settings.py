"""Settings of the supervised warm start and of GRPO, without heavy imports. README.md explains each choice."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tasks.core.settings import Settings
from tasks.learning.shared.exploration_settings import ExplorationSettings
from tasks.models.settings import LoRASettings

LARGEST_SEQUENCE_CLIP = 0.1  # beyond this, hardly any trajectory's ratio is clipped
Beta = Annotated[float, Field(ge=0, lt=1)]
Packing = Literal["tree", "none"]
Autocast = Literal["none", "bfloat16"]
Aggregation = Literal["token", "sequence", "constant"]
KLEstimator = Literal["k2", "k3"]
ImportanceCorrection = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
Difficulty = Literal["level", "calls", "tools", "strictness"]


class OptimizerSettings(Settings):
    """The optimizer, its schedule, and how a step is computed. `micro_batch_tokens` counts padded tokens."""

    optimizer: Literal["adamw", "muon"]
    learning_rate: float = Field(ge=0)
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int = Field(ge=0)
    final_learning_rate_share: float = Field(ge=0, le=1)
    betas: list[Beta] = Field(min_length=2, max_length=2)
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)
    packing: Packing
    micro_batch_tokens: int = Field(ge=1)
    autocast: Autocast
    gradient_checkpointing: bool
    checkpoint_interval: int = Field(ge=1)


class StopSettings(Settings):
    """When a warm start is good enough, and what happens where it is not (infra/decisions/0058).

    An attempt is `num_steps`. After it, `num_problems` of select are played once; with `minimum_success` the warm start
    ends, else another attempt begins, of `max_attempts` in all. With `held_out_share` above 0 that share of the split
    groups is never trained on, and an attempt ends early when `patience` checks of its loss brought nothing better.
    """

    num_problems: int = Field(ge=1)
    minimum_success: float = Field(gt=0, le=1)
    max_attempts: int = Field(ge=1)
    rate_factor: float = Field(gt=0, le=1)
    held_out_share: float = Field(ge=0, lt=1)
    check_interval: int = Field(ge=1)
    patience: int = Field(ge=1)


class SupervisedSettings(OptimizerSettings):
    num_steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    stop: StopSettings | None


class LevelsSettings(Settings):
    """Levels that open one after the other: by a problem's own `level`, or by its reference's `calls` (the horizon),
    different `tools`, or `strictness` (the values that a solution must get right).
    """

    by: Difficulty
    open_at: float = Field(gt=0, lt=1)
    confidence: float = Field(gt=0.5, lt=1)


class BandSettings(Settings):
    """Problems solved sometimes: `low` to `high` is their solve rate. `prior_strength` is in episodes, `half_life` in
    iterations (null: nothing is forgotten). The outlook reads the prior with any sampler.
    """

    low: float = Field(ge=0, lt=1)
    high: float = Field(gt=0, le=1)
    uniform_share: float = Field(gt=0, le=1)
    prior_strength: float = Field(gt=0)
    half_life: float | None = Field(gt=0)
    levels: LevelsSettings | None

    @model_validator(mode="after")
    def _check_width(self) -> BandSettings:
        if self.low >= self.high:
            raise ValueError(
                f"low is {self.low:g} and high {self.high:g}, so no solve rate is between them. "
                f"Set train.band.low below train.band.high, such as 0.1 and 0.9"
            )
        return self


class StreamingSettings(Settings):
    """Groups stream to the trainer as they finish (infra/decisions/0070): `groups_under_way` are played all the time.
    A batch that the trainer has waited for since `batch_deadline_seconds` (null: no deadline) is trained on as it is,
    if it has at least `least_batch_share` of its groups; the others go on, for the next batch.
    """

    groups_under_way: int = Field(ge=1)
    batch_deadline_seconds: float | None = Field(gt=0)
    least_batch_share: float = Field(gt=0, le=1)


class GRPOSettings(OptimizerSettings):
    """Group-relative policy optimisation. One iteration: one batch of rollouts, over which the trainer passes
    `updates_per_batch` times with `steps_per_batch` optimizer steps each.
    """

    num_iterations: int = Field(ge=1)
    snapshot_interval: int = Field(ge=1)
    problems_per_iteration: int = Field(ge=1)
    group_size: int = Field(ge=1)
    problem_sampler: Literal["uniform", "adaptive", "band"]
    adaptive_floor: float = Field(gt=0, le=1)
    adaptive_update_rate: float = Field(gt=0, le=1)
    band: BandSettings
    max_replacement_rounds: int = Field(ge=0)
    zero_variance_groups: Literal["drop", "keep"]
    filter_overlong: bool
    updates_per_batch: int = Field(ge=1)
    steps_per_batch: int = Field(ge=1)
    advantage: Literal["std", "mean", "leave_one_out", "turn_leave_one_out"]
    loss: Literal["ppo", "gspo", "cispo"]
    clip_low: float = Field(ge=0, le=1)
    clip_high: float = Field(ge=0)
    aggregation: Aggregation
    constant_length: int | None = Field(ge=1)
    kl_weight: float = Field(ge=0)
    kl_estimator: KLEstimator
    reference_interval: int | None = Field(ge=1)
    reference_mix: float = Field(gt=0, le=1)
    importance_correction: Literal["none", ImportanceCorrection]
    importance_cap: float = Field(gt=1)
    max_staleness: int = Field(ge=0)
    streaming: StreamingSettings | None
    exploration: ExplorationSettings | None
    lora: LoRASettings | None

    @model_validator(mode="after")
    def _refuse_useless_combinations(self) -> GRPOSettings:
        for is_wrong, message in (
            (self.loss == "gspo" and max(self.clip_low, self.clip_high) > LARGEST_SEQUENCE_CLIP,
             f"clip_low is {self.clip_low:g} and clip_high {self.clip_high:g} with loss: gspo, but the mean "
             "ratio of a trajectory rarely moves that far, so nothing would be clipped. Set train.clip_low to 3.0e-4 "
             "and train.clip_high to 4.0e-4 (GSPO)"),
            (self.zero_variance_groups == "keep" and self.max_replacement_rounds > 0,
             f"max_replacement_rounds is {self.max_replacement_rounds} with zero_variance_groups: keep, so groups "
             "without signal would be both replaced and trained on. Set train.zero_variance_groups "
             "to drop, or train.max_replacement_rounds to 0"),
            (self.group_size < 2, f"group_size is {self.group_size} with advantage: {self.advantage}, but one has "
             "nothing to compare with: its std is undefined, its advantage 0. Set train.group_size to 2 or more, as 8"),
            (self.steps_per_batch > self.problems_per_iteration, f"steps_per_batch is {self.steps_per_batch} with "
             f"problems_per_iteration {self.problems_per_iteration}, but an optimizer step takes whole groups, one per "
             "problem, so some steps would have none. Set train.steps_per_batch to at most "
             f"{self.problems_per_iteration}, or train.problems_per_iteration higher"),
            (self.kl_weight == 0 and self.reference_interval is not None,
             f"reference_interval is {self.reference_interval} with kl_weight 0, but then no reference model is "
             "loaded, so it would have no effect. Set train.reference_interval to null, or train.kl_weight above 0"),
            (self.reference_interval is None and self.reference_mix < 1, f"reference_mix is {self.reference_mix:g} "
             "with reference_interval null, so the reference never moves. Set train.reference_mix to 1 or an interval"),
            (self.lora is not None and self.reference_mix < 1,
             f"reference_mix is {self.reference_mix:g} with train.lora, but a mix of two adapters is no adapter of "
             "their rank. Set train.reference_mix to 1, or train.lora to null"),
            (self.aggregation == "constant" and self.constant_length is None,
             "aggregation: constant divides by train.constant_length, which is null. "
             "Set it to a length in tokens, such as sampling.max_tokens_per_episode"),
            (self.aggregation != "constant" and self.constant_length is not None,
             f"constant_length is {self.constant_length} with aggregation: {self.aggregation}, which does not read it. "
             "Set train.constant_length to null, or train.aggregation to constant"),
            (self.max_staleness > 0 and self.importance_correction == "none",
             f"max_staleness is {self.max_staleness} with importance_correction: none, so episodes of "
             "older weights would be trained on as if the current policy wrote them. Set "
             "train.importance_correction, such as to token_truncate, or train.max_staleness to 0"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_exploration(self) -> GRPOSettings:
        """`group_size` is the most: memory is planned by it."""
        if self.exploration is None:
            return self
        if self.exploration.prefixes and self.problems_per_iteration == 1 and self.max_replacement_rounds == 0:
            raise ValueError(
                "exploration.prefixes with problems_per_iteration 1: at least one group of a batch is played from its "
                "start, so no episode would begin with one. Set train.problems_per_iteration to 2 or more, or "
                "train.exploration.prefixes to null"
            )
        samples = [point.value for point in self.exploration.samples_per_problem or ()] or [self.group_size]
        if max(samples) > self.group_size:
            raise ValueError(
                f"exploration.samples_per_problem goes up to {max(samples)} with group_size {self.group_size}, by "
                f"which memory is planned. Set train.group_size to {max(samples)}, or the samples lower"
            )
        if self.exploration.keep is not None and self.exploration.keep >= min(samples):
            raise ValueError(
                f"exploration.keep is {self.exploration.keep} and a group has {min(samples)} trajectories, so nothing "
                f"would be left out. Set train.exploration.keep lower, or to null"
            )
        return self

    @model_validator(mode="after")
    def _check_streaming(self) -> GRPOSettings:
        streaming, exploration = self.streaming, self.exploration
        if streaming is None:
            return self
        per_batch, under_way = self.problems_per_iteration, streaming.groups_under_way
        least, fewer = -(-under_way // per_batch) + 1, (self.max_staleness - 1) * per_batch
        or_fewer = f", or train.streaming.groups_under_way to at most {fewer}" if fewer >= per_batch else ""
        for is_wrong, message in (
            (self.max_staleness < least, f"train.max_staleness is {self.max_staleness}, but with {under_way} groups "
             f"under way for {per_batch} in a batch many tokens are trained on {least} versions later, too old for "
             f"loss. Set train.max_staleness to {least} or more{or_fewer}"),
            (under_way < per_batch, f"groups_under_way is {under_way} and train.problems_per_iteration {per_batch}, so "
             "every batch would wait for groups that begin after all others. Set train.streaming.groups_under_way to "
             f"{per_batch} or more, such as {2 * per_batch} with train.max_staleness 3"),
            (exploration is not None and exploration.temperature is not None,
             "train.exploration.temperature is a schedule, and an episode that goes on under the next weights would be "
             "of two temperatures. Set train.exploration.temperature to null, or train.streaming to null"),
            (exploration is not None and exploration.prefixes is not None,
             "train.exploration.prefixes begins some groups in the middle, and a batch of those that finish first "
             "might have no other, and so no success to report. Set train.exploration.prefixes to null, or "
             "train.streaming to null"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(f"streaming is on, and {message}")
        return self

    @model_validator(mode="after")
    def _refuse_stale_nucleus(self) -> GRPOSettings:
        """Tokens that it leaves out are never drawn, so no weight brings them back once the policy moved."""
        points = self.exploration.top_p if self.exploration else None
        on_policy = {"updates_per_batch": 1, "steps_per_batch": 1, "max_staleness": 0}
        changes = [f"train.{name} to {value}" for name, value in on_policy.items() if getattr(self, name) != value]
        if points is not None and changes:
            raise ValueError(
                f"exploration.top_p is a schedule, and only the first step after a batch is of the policy that drew "
                f"it: a later one would need the probability of tokens that were never drawn. Set "
                f"{' and '.join(changes)}, or train.exploration.top_p to null"
            )
        return self
