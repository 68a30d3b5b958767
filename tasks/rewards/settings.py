"""Settings of the reward."""

from __future__ import annotations

import math

from pydantic import Field, field_validator, model_validator

from tasks.core.settings import Settings
from tasks.rewards.function import load_function

OUTCOME_GAP = 1.0  # reward of a success minus a failure, without parts


class RewardSettings(Settings):
    """The most that each part can add to the outcome; weights of 0 are success alone. `function` is explained in
    `function.py`.
    """

    format_weight: float = Field(ge=0)
    execution_weight: float = Field(ge=0)
    function: str | None
    function_weight: float = Field(ge=0)

    @property
    def most(self) -> float:
        """The reward of a success with all of every part."""
        return math.fsum((OUTCOME_GAP, self.format_weight, self.execution_weight, self.function_weight))

    @field_validator("function")
    @classmethod
    def _is_a_function(cls, path: str | None) -> str | None:
        if path is not None:
            load_function(path)
        return path

    @model_validator(mode="after")
    def function_has_a_weight(self) -> RewardSettings:
        if self.function is not None and self.function_weight == 0:
            raise ValueError(
                f"function is {self.function} and function_weight is 0, so it would have no effect. Give it a weight "
                f"such as 0.2, or set function: null"
            )
        if self.function is None and self.function_weight > 0:
            raise ValueError(
                f"function_weight is {self.function_weight:g} and function is null, so it would have no effect. Name "
                f"a function such as tasks.custom.rewards:score, or set function_weight: 0.0"
            )
        return self

    @model_validator(mode="after")
    def outcome_dominates(self) -> RewardSettings:
        total = math.fsum((self.format_weight, self.execution_weight, self.function_weight))
        if total >= OUTCOME_GAP:
            excess = f"{total - OUTCOME_GAP:g} above" if total > OUTCOME_GAP else "equal to"
            raise ValueError(
                f"format_weight + execution_weight + function_weight is {total:g}, {excess} the {OUTCOME_GAP:g} that a "
                f"success earns more than a failure, so a well-formed failure could earn as much as a success, and the "
                f"policy would learn form instead of success. Keep their sum below {OUTCOME_GAP:g}, such as 0.2 each"
            )
        return self
