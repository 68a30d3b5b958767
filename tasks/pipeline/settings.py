"""The section `pipeline` of params.yaml: what a run does beside another, how long a stage may take, what is retried.

It changes no result, so no DVC stage depends on it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tasks.core.settings import Settings
from tasks.pipeline.champion_check import DriftCheckSettings

Hours = Annotated[float, Field(gt=0)]


class StageTimeoutHours(Settings):
    """The longest that each step of a run may take; null is no limit. The last two are flows of their own."""

    curate: Hours | None
    assess: Hours | None
    warm_start: Hours | None
    doctor: Hours | None
    train: Hours | None
    evaluate: Hours | None
    promote: Hours | None
    report: Hours | None
    drift_check: Hours | None
    evaluate_snapshot: Hours | None

    def seconds(self, step: str) -> float | None:
        hours: float | None = getattr(self, step.replace("-", "_"))
        return None if hours is None else 3600 * hours


class RetentionSettings(Settings):
    """What `python -m tasks prune` keeps beside what an alias, a rollback or a lineage needs."""

    keep_runs: int = Field(ge=1)
    keep_checkpoints_days: float = Field(gt=0)


class LaunchSettings(Settings):
    """How many processes train one policy, and who starts them (infra/decisions/0067). No stage depends on it: a result
    is the same to the last digits of float32, and a run may go on with another number.

    `local`: this process alone. `torchrun`: `python -m tasks train` starts `num_trainers` of them on this machine, and
    again from the last checkpoint after one has died, at most `max_restarts` times. `external`: they exist already, as
    torchrun or Slurm starts them, each with the same command. `meet_seconds` is how long they wait for each other.
    """

    launcher: Literal["local", "torchrun", "external"]
    num_trainers: int = Field(ge=1)
    max_restarts: int = Field(ge=0)
    meet_seconds: float = Field(gt=0)

    @model_validator(mode="after")
    def _local_is_one(self) -> LaunchSettings:
        if self.launcher == "local" and self.num_trainers > 1:
            raise ValueError(
                f"num_trainers is {self.num_trainers} with launcher: local, which is one process, so the others would "
                f"not exist. Set launch.launcher to torchrun, or launch.num_trainers to 1"
            )
        return self


class PipelineSettings(Settings):
    on_busy: Literal["skip", "wait"]
    stage_timeout_hours: StageTimeoutHours
    max_retries: int = Field(ge=0)
    retry_delay_seconds: float = Field(ge=0)
    approval_timeout_hours: Hours
    retention: RetentionSettings
    drift_check: DriftCheckSettings


class PipelineSections(Settings):
    pipeline: PipelineSettings
