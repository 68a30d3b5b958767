"""Settings of `train.exploration`: schedules over the iterations, and replayed starts. README.md explains them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tasks.core.settings import Settings


class Point(Settings):
    """Of a schedule over the iterations, in straight lines from point to point."""

    iteration: int = Field(ge=1)
    value: float


class TemperaturePoint(Point):
    value: float = Field(gt=0)


class PartPoint(Point):
    value: float = Field(gt=0, le=1)


class SharePoint(Point):
    value: float = Field(ge=0, lt=1)


class SamplesPoint(Settings):
    iteration: int = Field(ge=1)
    value: int = Field(ge=2)


class PrefixSettings(Settings):
    """Groups whose episodes all begin with the same replayed turns (arXiv:2605.05112; infra/decisions/0065).

    `share` of a batch's groups do on average, as far as there is something to replay: the `reference` of the problem,
    or one of the policy's `own` episodes. Up to `depth` of its turns are replayed, or one where that is less, never the
    last.
    """

    source: Literal["reference", "own"]
    share: list[SharePoint] = Field(min_length=1)
    depth: list[PartPoint] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_schedules(self) -> PrefixSettings:
        check_points("prefixes.share", self.share)
        check_points("prefixes.depth", self.depth)
        return self


class ExplorationSettings(Settings):
    """Schedules over the iterations, and which rollouts carry loss (infra/decisions/0059 and 0065). Temperature and
    top-p go in straight lines from point to point; a number of samples holds from its point on. `keep` rollouts of each
    group carry loss, those with the largest variance of reward; null: all. `prefixes` replays the start of episodes.
    """

    temperature: Annotated[list[TemperaturePoint], Field(min_length=1)] | None
    top_p: Annotated[list[PartPoint], Field(min_length=1)] | None
    samples_per_problem: Annotated[list[SamplesPoint], Field(min_length=1)] | None
    keep: int | None = Field(ge=2)
    prefixes: PrefixSettings | None

    @model_validator(mode="after")
    def _check_schedules(self) -> ExplorationSettings:
        check_points("temperature", self.temperature or ())
        check_points("top_p", self.top_p or ())
        check_points("samples_per_problem", self.samples_per_problem or ())
        return self


def check_points(name: str, points: Sequence[Point | SamplesPoint]) -> None:
    at = [point.iteration for point in points]
    if at and (at[0] != 1 or at != sorted(set(at))):
        raise ValueError(
            f"exploration.{name} has points at iterations {', '.join(map(str, at))}, so what holds at some "
            f"iteration is not said. Begin at iteration 1, and let each point be later than the one before it"
        )
