"""Settings of evaluate."""

from __future__ import annotations

from pydantic import Field

from tasks.core.settings import Settings
from tasks.engines.endpoint.settings import FrontierSettings
from tasks.rollouts.settings import DistributionSettings, PlaySections, PlaySettings


class RacingSettings(Settings):
    error_rate: float = Field(gt=0, lt=0.5)
    num_rounds: int = Field(ge=2, le=10)
    min_problems: int = Field(ge=1)
    max_finalists: int | None = Field(ge=1)


class EvaluateSettings(Settings):
    """Episodes per problem, racing (null: none), the confidence of every interval, the power of the smallest detectable
    difference, and the endpoint to compare with (frontier null: none). `sampling` is the distribution used here and
    where promote measures a champion; null: as in training. `greedy` plays base, warm start and best once more, each
    turn the likeliest one.
    """

    sampling: DistributionSettings | None
    greedy: bool
    select_samples_per_problem: int = Field(ge=1)
    test_samples_per_problem: int = Field(ge=1)
    racing: RacingSettings | None
    confidence: float = Field(gt=0.5, lt=1)
    power: float = Field(gt=0.5, lt=1)
    frontier: FrontierSettings | None


class EvaluateSections(PlaySections):
    evaluate: EvaluateSettings

    @property
    def plays(self) -> dict[str, PlaySettings]:
        """How models are played on each split: training's budgets, and possibly another distribution."""
        return {
            "select": self.play(self.evaluate.select_samples_per_problem, drawn_from=self.evaluate.sampling),
            "test": self.play(self.evaluate.test_samples_per_problem, drawn_from=self.evaluate.sampling),
            "greedy": self.play(1, drawn_from=DistributionSettings(temperature=0, top_p=1)),
        }
