"""The sections `pipeline` of params.yaml (what a run does beside another, how long a stage may take, what is retried)
and `serve` (`python -m tasks serve`). They change no result, so no DVC stage depends on them.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tasks.core.settings import Settings, VariableName
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
    max_retries: int = Field(ge=0, le=50)  # Prefect takes no more
    retry_delay_seconds: float = Field(ge=0)
    approval_timeout_hours: Hours
    retention: RetentionSettings
    drift_check: DriftCheckSettings


class PipelineSections(Settings):
    pipeline: PipelineSettings


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression ({error}), so it would hide nothing") from None
    return pattern


class RecordSettings(Settings):
    """What `serve --record` hides of conversations, beside secrets, and how large a file of them gets."""

    redact: list[Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]]
    max_file_mib: int = Field(ge=1)


class ServeSettings(Settings):
    """`port` is on the loopback, 0 is a free one. `key_variable`: whose value every request must give; null asks for
    none. `webhook_secret_variable`: of MLflow's webhook that posts to /reload. `poll_seconds`: between two looks at
    where the alias leads. `max_waiting`: requests that are not begun; one more is told to come again.
    """

    port: int = Field(ge=0, le=65535)
    key_variable: VariableName | None
    webhook_secret_variable: VariableName | None
    poll_seconds: float = Field(gt=0)
    max_waiting: int = Field(ge=1)
    record: RecordSettings
