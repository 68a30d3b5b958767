"""Settings of evaluate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tasks.core.settings import Settings
from tasks.engines.endpoint.settings import FrontierSettings
from tasks.environments.settings import EnvironmentSettings, OtherEnvironmentSettings, folder_of, members_of
from tasks.rollouts.settings import DistributionSettings, PlaySections, PlaySettings


class RacingSettings(Settings):
    error_rate: float = Field(gt=0, lt=0.5)
    num_rounds: int = Field(ge=2, le=10)
    min_problems: int = Field(ge=1)
    max_finalists: int | None = Field(ge=1)


class AlsoSettings(OtherEnvironmentSettings):
    """An environment that training never saw, and how much of it is played; `max_level` null: all levels."""

    num_problems: int = Field(ge=1)
    samples_per_problem: int = Field(ge=1)

    @property
    def label(self) -> str:
        """Its name; of one in tasks/custom, with the class."""
        custom = _class_of(self)
        return self.name if custom is None else f"{self.name}-{custom.rpartition(':')[2]}"

    @property
    def budget_key(self) -> str:
        """The key of params that the budget of an episode is from."""
        name = "max_tokens_per_episode"
        return f"evaluate.also[].budgets.{name}" if name in self.budgets.given() else f"sampling.{name}"


class ReflexionSettings(Settings):
    """A frozen `policy` that tries failed test problems again with notes of its own. `max_attempts` null: as many per
    problem as training's episodes allow. `question` asks for the note. Notes are beyond the budget of an episode.
    """

    policy: Literal["base", "warm_start"]
    max_attempts: int | None = Field(ge=2)
    question: str = Field(min_length=1)
    max_note_tokens: int = Field(ge=1)
    max_memory_tokens: int = Field(ge=1)


class ShardedSettings(Settings):
    """The first `num_problems` of test that have parts (null: all), told in parts. `num_replays` counts the plays of
    the best snapshot's episodes with the same random numbers, by which the user's own noise is measured.
    """

    reveal: Literal["sharded", "on_request"]
    num_problems: int | None = Field(ge=1)
    samples_per_problem: int = Field(ge=1)
    num_replays: int = Field(ge=1)


class EvaluateSettings(Settings):
    """Episodes per problem, racing (null: none), the confidence of every interval, the power of the smallest detectable
    difference, and the endpoint to compare with (frontier null: none). `sampling` is the distribution used here and
    where promote measures a champion; null: as in training. `greedy` plays base, warm start and best once more, each
    turn the likeliest one. `also` plays them in environments that training never saw; `reflexion` is a baseline
    without training (null: none). `sharded` plays them on test told in parts (null: not).
    """

    sampling: DistributionSettings | None
    greedy: bool
    select_samples_per_problem: int = Field(ge=1)
    test_samples_per_problem: int = Field(ge=1)
    racing: RacingSettings | None
    confidence: float = Field(gt=0.5, lt=1)
    power: float = Field(gt=0.5, lt=1)
    frontier: FrontierSettings | None
    also: list[AlsoSettings]
    reflexion: ReflexionSettings | None
    sharded: ShardedSettings | None


class EvaluateSections(PlaySections):
    evaluate: EvaluateSettings

    @model_validator(mode="after")
    def _refuse_repeated_and_trained(self) -> EvaluateSections:
        labels = [other.label for other in self.evaluate.also]
        trained = {(played.name, _class_of(played)) for played in members_of(self.environment)}
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"evaluate.also has {', '.join(twice)} twice, and a row is told by its name. Name it once")
        for other in self.evaluate.also:
            if (other.name, _class_of(other)) in trained:
                raise ValueError(
                    f"evaluate.also names {other.label}, which this run trains on, so success there is no transfer. "
                    f"Name an environment that training never sees, or leave it out"
                )
            if other.name == "mixture":
                raise ValueError("evaluate.also names a mixture, which has no result of its own. Name its members")
            section = other.within(self.environment)
            section.refuse_asking_back()
            section.refuse_no_user()
        return self

    @model_validator(mode="after")
    def _refuse_strict_cache(self) -> EvaluateSections:
        if self.evaluate.also and self.environment.cache.mode == "strict":
            raise ValueError(
                "evaluate.also plays in environments whose tools environment.cache.mode: strict switches off, so no "
                "reference solution could be checked. Set evaluate.also to [], or environment.cache.mode to replay"
            )
        return self

    @model_validator(mode="after")
    def _check_user_of_sharded(self) -> EvaluateSections:
        if self.evaluate.sharded is not None and self.environment.user is not None:
            self.environment.user.refuse_telling_in_parts("evaluate.sharded", plain="null")
        return self

    @model_validator(mode="after")
    def _refuse_talk_with_agent(self) -> EvaluateSections:
        if getattr(self.environment.settings, "drives_itself", False):
            named = [name for name in ("frontier", "reflexion", "sharded") if getattr(self.evaluate, name) is not None]
            if named:
                raise ValueError(
                    f"evaluate.{named[0]} speaks to a policy itself, and in environment.name: agent only the agent "
                    f"does, so it would measure another task. Set evaluate.{named[0]} to null"
                )
        return self

    @model_validator(mode="after")
    def _check_judge_of_sharded(self) -> EvaluateSections:
        if self.evaluate.sharded is not None:
            self.environment.refuse_parts(of="evaluate.sharded", remedy="Set evaluate.sharded to null")
        return self

    def unwatched_folders(self) -> list[str]:
        return [*super().unwatched_folders(), *(folder_of(other.name) for other in self.evaluate.also)]

    def play_in(self, other: AlsoSettings) -> PlaySettings:
        """As on test, with that environment's budgets, which may be higher too."""
        play = self.play(other.samples_per_problem, drawn_from=self.evaluate.sampling)
        return play.model_copy(update={"sampling": play.sampling.model_copy(update=other.budgets.given())})

    @property
    def plays(self) -> dict[str, PlaySettings]:
        """How models are played on each split: training's budgets, and possibly another distribution."""
        return {
            "select": self.play(self.evaluate.select_samples_per_problem, drawn_from=self.evaluate.sampling),
            "test": self.play(self.evaluate.test_samples_per_problem, drawn_from=self.evaluate.sampling),
            "greedy": self.play(1, drawn_from=DistributionSettings(temperature=0, top_p=1)),
        }


def _class_of(played: EnvironmentSettings | OtherEnvironmentSettings) -> str | None:
    """Of one in tasks/custom, where each class is an environment of its own."""
    return getattr(played.settings, "object", None)
