"""Settings of generation: which engine, how it samples, and the budgets of an episode. Free of heavy imports."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from tasks.core.settings import Settings, read_own_settings
from tasks.environments.settings import EnvironmentSettings

ROOM, FOLDER = "tasks.engines", Path(__file__).parents[1] / "engines"


class OwnEngineSettings(Settings):
    """Base of the settings that one engine has for itself. The rest of it is of an engine in this process."""

    packages: ClassVar[tuple[str, ...]] = ()  # whose versions decide its tokens, beside torch and transformers

    def device(self) -> str:
        """What computes the tokens, as far as it changes them: the kind of GPU, or the processor's architecture."""
        return f"cpu, {platform.machine()}"


class EngineSettings(Settings):
    """The engine that generates, the settings of its own (null where it has none), how many episodes it holds at once,
    and how far its log-probs may be from the trainer's (nats: any token of the probe after a refresh, the mean over the
    first episodes of a training process).
    """

    name: str
    max_concurrent_episodes: int = Field(ge=1)
    probe_tolerance: float = Field(gt=0)
    settings: SerializeAsAny[OwnEngineSettings] | None

    @field_validator("name")
    @classmethod
    def _can_be_trained_with(cls, name: str) -> str:
        names = sorted(file.parent.name for file in FOLDER.glob("*/engine.py"))
        if name in names:
            return name
        known = (FOLDER / name / "__init__.py").is_file() and name.isidentifier()
        what = importlib.import_module(f"{ROOM}.{name}").__doc__ if known else f"there is no folder {name!r} in {ROOM}."
        raise ValueError(f"{str(what).strip()} So nothing can be trained with it. Choose one of: {', '.join(names)}")

    @field_validator("settings", mode="before")
    @classmethod
    def _read_as_the_engine_says(cls, given: Any, info: ValidationInfo) -> Settings | None:
        name = info.data.get("name")
        return read_own_settings(ROOM, name, given) if name else None

    @property
    def own(self) -> OwnEngineSettings:
        return self.settings or OwnEngineSettings()


class DistributionSettings(Settings):
    """What a token is drawn from: logits over the temperature, cut to the likeliest tokens that make up `top_p`."""

    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)


class SamplingSettings(DistributionSettings):
    """The sampling distribution and the budgets that end an episode.

    `max_tokens_per_episode` counts the prompt and tool replies too; `max_completion_tokens` everything after the
    prompt, where prompts are long and differ (null: no such limit). `max_turns` is of the whole episode. A turn also
    ends with any of the `stop_strings`, which stay in it.
    """

    max_turns: int = Field(ge=1)
    max_tokens_per_turn: int = Field(ge=1)
    max_tokens_per_episode: int = Field(ge=2)
    max_completion_tokens: int | None = Field(ge=1)
    stop_strings: list[Annotated[str, Field(min_length=1)]]

    def drawn_from(self, distribution: DistributionSettings | None) -> SamplingSettings:
        """The same budgets with tokens drawn from another distribution; None leaves it as it is."""
        return self if distribution is None else self.model_copy(update=distribution.model_dump())

    def token_limit(self, num_prompt_tokens: int) -> int:
        """The tokens an episode may have, its prompt included."""
        if self.max_completion_tokens is None:
            return self.max_tokens_per_episode
        return min(self.max_tokens_per_episode, num_prompt_tokens + self.max_completion_tokens)


class PlaySettings(Settings):
    """How a model is played on a set of problems: `samples_per_problem` episodes of each. Episodes under equal settings
    meet the same random numbers.
    """

    engine: EngineSettings
    sampling: SamplingSettings
    seed: int
    samples_per_problem: int = Field(ge=1)
    num_threads: int = Field(ge=1)


class PlaySections(Settings):
    """The sections of params.yaml that every stage reads that plays a model."""

    seed: int
    num_threads: int = Field(ge=1)
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings

    def play(self, samples_per_problem: int, *, drawn_from: DistributionSettings | None = None) -> PlaySettings:
        """`drawn_from` is the distribution of a measurement; None draws tokens as training does."""
        return PlaySettings(
            engine=self.engine,
            sampling=self.sampling.drawn_from(drawn_from),
            seed=self.seed,
            samples_per_problem=samples_per_problem,
            num_threads=self.num_threads,
        )
