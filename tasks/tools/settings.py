"""Settings that every environment has: treatment of calls, the tool cache, injected faults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tasks.core.custom_code import CUSTOM
from tasks.core.kept_files import MODELS
from tasks.core.settings import LocalFolder, Settings
from tasks.core.urls import is_url, local_path, parse_url

Rate = Annotated[float, Field(ge=0, le=1)]


class ToolSettings(Settings):
    operational: ClassVar[set[str]] = {
        *("timeout_seconds", "max_calls_per_turn", "max_workers"),
        *("max_retries", "backoff_seconds", "max_attempts", "max_dropped_share"),
    }

    timeout_seconds: float = Field(gt=0)
    max_reply_characters: int = Field(ge=100)
    max_calls_per_turn: int = Field(ge=1)
    max_workers: int = Field(ge=1)
    max_retries: int = Field(ge=0)
    backoff_seconds: float = Field(ge=0)
    max_attempts: int = Field(ge=1)
    max_dropped_share: Rate


def check_in_process(model: str, *, api_key_variable: str | None) -> None:
    """ValueError for a folder that is another after each run, or a key that nobody reads."""
    made = [f"{stage}/{name}" for stage, name in MODELS if Path(model).match(f"{stage}/{name}")]
    if made:
        raise ValueError(
            f"url is null, and model {model} is what the stage {made[0].partition('/')[0]} makes, so it is not there, "
            f"or an earlier run's, when this model is asked. Name the folder of model.path, or a copy elsewhere"
        )
    if api_key_variable is not None:
        raise ValueError(
            "url is null, and a model in this process takes no key, so api_key_variable has no effect. Set it to null"
        )


# For an environment made without params: in memory, calls are fast and replies short.
IN_MEMORY = ToolSettings(
    timeout_seconds=60,
    max_reply_characters=100_000,
    max_calls_per_turn=64,
    max_workers=16,
    max_retries=2,
    backoff_seconds=0.01,
    max_attempts=3,
    max_dropped_share=1.0,
)


def _read_off(value: Any) -> Any:
    """YAML reads `off` as false."""
    return "off" if value is False else value


def check_is_custom(file: str, folder: Path = CUSTOM) -> None:
    """ValueError if the file is not in tasks/custom/, or in a `folder` in it."""
    if folder not in Path(os.path.normpath(file)).parents:
        raise ValueError(
            f"{file!r} is not in {folder}/, so DVC would not see it change. Name a file in that folder, such as "
            f"{folder / Path(file).name}"
        )


class CacheSettings(Settings):
    """Modes: see `cache/environment.py`. `frozen`: a file written by `cache freeze`, or null."""

    mode: Annotated[Literal["off", "record", "replay", "strict"], BeforeValidator(_read_off)]
    folder: LocalFolder
    frozen: str | None

    @field_validator("frozen")
    @classmethod
    def _check_frozen_is_watched(cls, frozen: str | None) -> str | None:
        if frozen is None:
            return None
        if not is_url(frozen):
            check_is_custom(frozen)
        elif parse_url(frozen).sha256 is None:
            raise ValueError(
                f"{frozen!r} does not say which content it means, so no stage would run again when it changes. Write "
                f"#sha256=… after it; `python -m tasks cache freeze` prints the whole URL"
            )
        return frozen

    @property
    def frozen_file(self) -> Path | None:
        return None if self.frozen is None else local_path(self.frozen)


class PoolSettings(Settings):
    """Worker processes that play the episodes; `memory_gib` is each one's limit, over which it is replaced."""

    num_workers: int = Field(ge=1)
    max_restarts: int = Field(ge=0)
    memory_gib: float = Field(gt=0)


class FaultSettings(Settings):
    """Injected faults; each rate is a probability per call. `seen_by: model` shows errors to the policy as replies;
    `seen_by: turnwise` makes them environment faults, which retries must absorb. Truncated replies and renamed fields
    always reach the policy.
    """

    seed: int = Field(ge=0)
    seen_by: Literal["model", "turnwise"]
    error_rate: Rate
    timeout_rate: Rate
    rate_limit_rate: Rate
    latency_rate: Rate
    latency_seconds: float = Field(ge=0)
    truncate_rate: Rate
    rename_rate: Rate

    @model_validator(mode="after")
    def _check_sum_of_rates(self) -> FaultSettings:
        total = self.error_rate + self.timeout_rate + self.rate_limit_rate
        if total > 1:
            raise ValueError(
                f"error_rate, timeout_rate and rate_limit_rate add up to {total:g}, above 1, and a call has at most "
                f"one of them"
            )
        return self

    def changes_for_the_policy(self) -> dict[str, float]:
        """The rates that change what a policy reads; empty if there are none."""
        errors = ("error_rate", "timeout_rate", "rate_limit_rate") if self.seen_by == "model" else ()
        rates = {name: getattr(self, name) for name in (*errors, "truncate_rate", "rename_rate")}
        return {"seed": self.seed, **rates} if any(rates.values()) else {}
