"""One entry of `reward.parts`: a built-in part, one of retrieval with its cutoff, or a function of yours."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field, field_validator

from tasks.core.settings import Settings
from tasks.rewards.function import load_function

Weight = Annotated[float, Field(gt=0)]
PartName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]


class BuiltInPart(Settings):
    """`weight` multiplies the part's value. It is positive: penalties have negative values."""

    name: str
    weight: Weight


class RankedPart(BuiltInPart):
    """`k`: only the first k documents of the ranking count."""

    k: int = Field(ge=1)


class OwnPart(Settings):
    """`function`: `tasks.custom.module:name`, a pure function of (problem, trajectory) that returns 0 to 1."""

    name: PartName
    weight: Weight
    function: str

    @field_validator("function")
    @classmethod
    def _check_function(cls, path: str) -> str:
        load_function(path)
        return path


PartSettings: TypeAlias = OwnPart | RankedPart | BuiltInPart
