"""Settings of the reward."""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from tasks.core.settings import Settings

OUTCOME_GAP = 1.0  # reward of a success minus a failure, without parts


class RewardSettings(Settings):
    """The most that each part can add to the outcome; 0 and 0 is success alone."""

    format_weight: float = Field(ge=0)
    execution_weight: float = Field(ge=0)

    @model_validator(mode="after")
    def outcome_dominates(self) -> RewardSettings:
        total = math.fsum((self.format_weight, self.execution_weight))
        if total >= OUTCOME_GAP:
            excess = f"{total - OUTCOME_GAP:g} above" if total > OUTCOME_GAP else "equal to"
            raise ValueError(
                f"format_weight + execution_weight is {total:g}, {excess} the {OUTCOME_GAP:g} that a success earns "
                f"more than a failure, so a well-formed failure could earn as much as a success, and the policy would "
                f"learn form instead of success. Keep the sum of the two below {OUTCOME_GAP:g}, such as 0.2 each"
            )
        return self
