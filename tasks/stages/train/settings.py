"""Settings of train."""

from __future__ import annotations

import sys
from typing import Any, Literal

from pydantic import Field, model_validator

from tasks.core.settings import Settings
from tasks.environments.settings import EnvironmentSettings
from tasks.learning.shared.settings import GRPOSettings
from tasks.rewards.dominance import check_dominance
from tasks.rewards.limits import EpisodeLimits
from tasks.rewards.settings import JUDGED, RewardSettings
from tasks.rollouts.settings import PlaySections, SamplingSettings

# What an alarm does, and how much of the run is remembered; all else changes nothing before an alarm.
LASTING = {"action", "step_factor", "window"}


class SentinelSettings(Settings):
    """What to do on an alarm, and one limit per signal; null leaves a signal unwatched (tasks/learning/README.md).

    `window` is in iterations; entropy, KL and the mean mismatch are in nats per token. `max_zero_variance_share` is
    also the limit above which a run counts as untrained (`measurement/learnt.py`). `max_unearned_rise` is in reward per
    episode; `confidence` is of the two intervals it is judged by.
    """

    action: Literal["stop", "roll_back"]
    step_factor: float = Field(gt=0, lt=1)
    max_rollbacks: int = Field(ge=0)
    window: int = Field(ge=8)
    low_success: float = Field(ge=0, le=1)
    max_length_growth: float | None = Field(gt=1)
    max_overlong_rise: float | None = Field(gt=0, le=1)
    max_entropy_rise: float | None = Field(gt=0)
    max_repetition_rise: float | None = Field(gt=0, le=1)
    max_mean_mismatch: float | None = Field(gt=0)
    max_mismatch_weight: float | None = Field(gt=1)
    max_ratio: float | None = Field(gt=1)
    max_kl: float | None = Field(gt=0)
    max_clip_share: float | None = Field(gt=0, le=1)
    min_entropy: float | None = Field(gt=0)
    max_zero_variance_share: float | None = Field(gt=0, le=1)
    max_unearned_rise: float | None = Field(gt=0)
    confidence: float = Field(gt=0.5, lt=1)

    def limits(self) -> dict[str, float | None]:
        return self.model_dump(mode="json", exclude=LASTING)

    @model_validator(mode="after")
    def _check_max_rollbacks(self) -> SentinelSettings:
        if self.action == "roll_back" and self.max_rollbacks == 0:
            raise ValueError(
                "action is roll_back with max_rollbacks 0, so the first alarm would stop the run anyway. "
                "Set sentinel.action to stop, or sentinel.max_rollbacks to 1 or more"
            )
        return self


def episode_limits(sampling: SamplingSettings, environment: EnvironmentSettings) -> EpisodeLimits:
    """Calls beyond a message's limit get one joint error, which is one more call. An agent that drives itself may have
    a sequence per turn, each within the budget of an episode.
    """
    tokens = min(sampling.max_tokens_per_episode, sampling.max_completion_tokens or sys.maxsize)
    if environment.has_agent:
        of_turn = sampling.max_tokens_per_turn + (sampling.max_thinking_tokens_per_turn or 0)
        tokens = sampling.max_turns * min(of_turn, tokens)
    return EpisodeLimits(
        max_turns=sampling.max_turns,
        max_calls=sampling.max_turns * (environment.tools.max_calls_per_turn + 1),
        max_sampled_tokens=tokens,
    )


class TrainSections(PlaySections):
    reward: RewardSettings
    train: GRPOSettings
    sentinel: SentinelSettings

    def resume_key(self) -> dict[str, Any]:
        """Without the sentinel's limits: a run that it stopped goes on where they are raised, as its advice is."""
        return super().resume_key() | {"sentinel": self.sentinel.model_dump(mode="json", include=LASTING)}

    @model_validator(mode="after")
    def _check_dominance(self) -> TrainSections:
        check_dominance(self.reward, episode_limits(self.sampling, self.environment))
        return self

    @model_validator(mode="after")
    def _refuse_no_judge(self) -> TrainSections:
        judged = [part.name for part in self.reward.parts if part.name in JUDGED]
        if judged and self.environment.judge is None:
            raise ValueError(
                f"reward.parts has {' and '.join(judged)}, and environment.judge is null, so no episode could be "
                f"scored. Fill in environment.judge (tasks/tools/README.md has an example), or take the part out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_prefixes_of_agent(self) -> TrainSections:
        if self.environment.has_agent and self.train.exploration and self.train.exploration.prefixes:
            raise ValueError(
                "train.exploration.prefixes begins episodes in the middle, and an agent that drives itself cannot be "
                "brought there. Set train.exploration.prefixes to null"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> TrainSections:
        """With top_p, weights of whole sequences had a mean of 0.006; without it, 1."""
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0, so the episodes of a group are all the same and nothing can be learnt from "
                "comparing them. Set sampling.temperature to 1; to measure greedily, set evaluate.greedy"
            )
        exploration = self.train.exploration
        for name in ("temperature", "top_p"):
            if self.engine.own.has_own_memory and exploration is not None and getattr(exploration, name) is not None:
                raise ValueError(
                    f"train.exploration.{name} is a schedule, and engine.name is {self.engine.name}, which keeps "
                    f"the {name} it started with. Set train.exploration.{name} to null, or engine.name to "
                    f"transformers"
                )
        if self.sampling.top_p < 1:
            raise ValueError(
                f"sampling.top_p is {self.sampling.top_p:g}, but training assumes samples from the whole "
                f"distribution: weights that correct for the engine vanish. Set sampling.top_p to 1; to draw "
                f"training's episodes with it, set train.exploration.top_p; to use top_p in measurements, set "
                f"evaluate.sampling, such as to "
                f"{{temperature: {self.sampling.temperature:g}, top_p: {self.sampling.top_p:g}}}"
            )
        return self
