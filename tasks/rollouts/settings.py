"""Settings of generation: the engine, sampling, and the budgets of an episode. No heavy imports."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from tasks.core.settings import Settings, read_own_settings
from tasks.core.text import counted
from tasks.environments.settings import EnvironmentSettings
from tasks.models.differences import Tolerance, tolerance_of
from tasks.models.settings import ComputeSettings
from tasks.models.torch_setup import device_name

# In a process on Ray's cluster: its address, and the namespace of the hosts of the engine's servers.
SERVERS_ON_RAY = "TURNWISE_SERVERS_ON_RAY"
MORE_ROOM = (
    "Lower engine.settings.num_servers, or set engine.settings.mode: in_process, which shares the trainer's GPU."
)
ROOM, FOLDER = "tasks.engines", Path(__file__).parents[1] / "engines"


class OwnEngineSettings(Settings):
    """Base of one engine's own settings; the defaults are those of an engine in this process."""

    has_own_memory: ClassVar[bool] = False  # else it generates with the trainer's model itself
    packages: ClassVar[tuple[str, ...]] = ()  # their versions change its tokens, as those of torch and transformers do

    @property
    def num_own_servers(self) -> int:
        """How many servers the engine starts, each on GPUs of its own."""
        return 0

    @property
    def num_own_gpus(self) -> int:
        """That those servers take of this machine."""
        return 0

    def crowd_fault(self, *, num_trainers: int, num_gpus: int) -> str | None:
        """Why trainers and servers of this machine would share a GPU; None where each has its own, or none has any."""
        wanted = num_trainers + self.num_own_gpus
        if not self.num_own_gpus or not 0 < num_gpus < wanted:
            return None
        return (
            f"{counted(num_trainers, 'trainer')} and {counted(self.num_own_servers, 'server')} of the engine ask for "
            f"{wanted} GPUs of this machine, which has {num_gpus}, and what a server takes of a trainer's GPU it never "
            f"gives back"
        )

    def weights_dtype(self, compute: ComputeSettings) -> str:
        return compute.weights

    def device(self, compute: ComputeSettings) -> str:
        """The hardware that affects the tokens: the kind of GPU, or the processor's architecture."""
        return device_name(compute)


class EngineSettings(Settings):
    """`probe_tolerance` bounds the mean difference of engine and trainer over tokens (nats); the 99th percentile may be
    8 times and the largest 40 times that. `auto` goes by the coarser of their dtypes. It holds for the probe after each
    refresh and for a training process's first episodes.
    """

    name: str
    max_concurrent_episodes: int = Field(ge=1)
    probe_tolerance: Literal["auto"] | Annotated[float, Field(gt=0)]
    settings: SerializeAsAny[OwnEngineSettings] | None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        names = sorted(file.parent.name for file in FOLDER.glob("*/engine.py"))
        if name in names:
            return name
        known = (FOLDER / name / "__init__.py").is_file() and name.isidentifier()
        if not known:
            raise ValueError(
                f"there is no folder {name!r} in tasks/engines/, so no turn can be written. Choose one of: "
                f"{', '.join(names)}"
            )
        what = str(importlib.import_module(f"{ROOM}.{name}").__doc__).strip()
        raise ValueError(f"{what} So nothing can be trained with it. Choose one of: {', '.join(names)}")

    @field_validator("settings", mode="before")
    @classmethod
    def _read_own_settings(cls, given: Any, info: ValidationInfo) -> Settings | None:
        name = info.data.get("name")
        return read_own_settings(ROOM, name, given) if name else None

    @property
    def own(self) -> OwnEngineSettings:
        return self.settings or OwnEngineSettings()

    def tolerance(self, *dtypes: str) -> Tolerance:
        """`dtypes` are those of the two that are compared."""
        return tolerance_of(*dtypes) if self.probe_tolerance == "auto" else Tolerance(self.probe_tolerance)


class DistributionSettings(Settings):
    """`temperature` 0 is greedy: the likeliest token each time. Training refuses it, since it explores nothing."""

    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)


class SamplingSettings(DistributionSettings):
    """The sampling distribution and the budgets that end an episode.

    `max_tokens_per_episode` includes the prompt and tool replies; `max_completion_tokens` is everything after the
    prompt (null: no limit), for prompts that are long and differ. `max_turns` is per episode. A turn also ends with any
    of the `stop_strings`, which stay in it. `max_thinking_tokens_per_turn` gives a thought a budget of its own: what
    it cuts is closed for the model, and `max_tokens_per_turn` is for the message after it (null: for both).
    """

    max_turns: int = Field(ge=1)
    max_tokens_per_turn: int = Field(ge=1)
    max_thinking_tokens_per_turn: int | None = Field(ge=1)
    max_tokens_per_episode: int = Field(ge=2)
    max_completion_tokens: int | None = Field(ge=1)
    stop_strings: list[Annotated[str, Field(min_length=1)]]

    @model_validator(mode="after")
    def _check_room_after_thought(self) -> SamplingSettings:
        most, thought = self.max_completion_tokens, self.max_thinking_tokens_per_turn
        if most is not None and thought is not None and most <= thought:
            raise ValueError(
                f"max_completion_tokens is {most} and max_thinking_tokens_per_turn {thought}, so one full thought ends "
                f"an episode before any message. Set sampling.max_completion_tokens to null or to several turns' "
                f"thoughts and messages, or sampling.max_thinking_tokens_per_turn lower"
            )
        return self

    def drawn_from(self, distribution: DistributionSettings | None) -> SamplingSettings:
        """The same budgets with another distribution; None changes nothing."""
        return self if distribution is None else self.model_copy(update=distribution.model_dump())

    def within(self, budgets: Mapping[str, int]) -> SamplingSettings:
        """With the lower budgets of one environment; ValueError where one is higher."""
        for name, budget in budgets.items():
            most = getattr(self, name)
            if most is not None and budget > most:
                raise ValueError(
                    f"environment.settings: a member's {name} is {budget}, above sampling.{name} = {most}, for which "
                    f"engine and trainer make room. Raise sampling.{name} to {budget}, or lower the member's."
                )
        return self.model_copy(update=dict(budgets)) if budgets else self

    def token_limit(self, num_prompt_tokens: int) -> int:
        if self.max_completion_tokens is None:
            return self.max_tokens_per_episode
        return min(self.max_tokens_per_episode, num_prompt_tokens + self.max_completion_tokens)


class PlaySettings(Settings):
    """How a model is played on a set of problems. Equal settings give equal random numbers."""

    engine: EngineSettings
    sampling: SamplingSettings
    seed: int
    samples_per_problem: int = Field(ge=1)
    compute: ComputeSettings


class PlaySections(Settings):
    seed: int
    compute: ComputeSettings
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings

    def unwatched_folders(self) -> list[str]:
        """dvc.yaml watches the one environment and the one engine that params name."""
        return self.environment.further_code()

    def play(self, samples_per_problem: int, *, drawn_from: DistributionSettings | None = None) -> PlaySettings:
        """`drawn_from` is a measurement's distribution; None samples as training does."""
        return PlaySettings(
            engine=self.engine,
            sampling=self.sampling.drawn_from(drawn_from),
            seed=self.seed,
            samples_per_problem=samples_per_problem,
            compute=self.compute,
        )
