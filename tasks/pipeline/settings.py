"""The section `pipeline` of params.yaml: what a run does beside another, how long a stage may take, what is retried.

It changes no result, so no DVC stage depends on it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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
