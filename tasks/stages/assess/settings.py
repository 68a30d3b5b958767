"""Settings of assess."""

from __future__ import annotations

from pydantic import Field, model_validator

from tasks.core.settings import Settings
from tasks.models.settings import ModelSettings
from tasks.rollouts.settings import PlaySections


class AssessSettings(Settings):
    """How many episodes the gate plays, and its thresholds; `skip_rl_above` null: no model is too good for RL."""

    samples_per_problem: int = Field(ge=1)
    num_problems: int = Field(ge=1)
    max_episodes: int = Field(ge=1)
    warm_start_below: float = Field(ge=0, le=1)
    skip_rl_above: float | None = Field(ge=0, le=1)
    confidence: float = Field(gt=0.5, lt=1)

    @property
    def may_warm_start(self) -> bool:
        """Whether any success could be low enough for a warm start."""
        return self.warm_start_below > 0

    @model_validator(mode="after")
    def _check_order_of_thresholds(self) -> AssessSettings:
        if self.skip_rl_above is not None and self.skip_rl_above <= self.warm_start_below:
            raise ValueError(
                f"skip_rl_above ({self.skip_rl_above}) is not above warm_start_below ({self.warm_start_below}), so a "
                f"model could be both too weak and too good for RL; raise the first or lower the second"
            )
        return self


class AssessSections(PlaySections):
    model: ModelSettings
    assess: AssessSettings
