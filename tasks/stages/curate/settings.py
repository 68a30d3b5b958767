"""Settings of curate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tasks.core.settings import Settings
from tasks.environments.settings import EnvironmentSettings


class SplitSettings(Settings):
    """`train_share` is the share of split groups in train; the rest is halved.

    Another `split_seed` moves most groups, another `train_share` some: test then contains what a champion was trained
    on, which `promote` leaves out. Another `num_test_sets` only moves groups between test sets.
    """

    split: Literal["groups", "published"]
    split_seed: int = Field(ge=0)
    train_share: float = Field(gt=0, lt=1)
    max_select_problems: int = Field(ge=1)
    max_test_problems: int = Field(ge=1)
    num_test_sets: int = Field(ge=1)
    test_rotation: int = Field(ge=0)

    @model_validator(mode="after")
    def _check_test_rotation(self) -> SplitSettings:
        if self.test_rotation >= self.num_test_sets:
            raise ValueError(
                f"test_rotation is {self.test_rotation}, but num_test_sets ({self.num_test_sets}) gives only the "
                f"test sets 0 to {self.num_test_sets - 1}: problems of train and select cannot test a champion that "
                f"learnt from them. Set test_rotation lower, and add problems of new split groups for a fresh test "
                f"set; or raise num_test_sets, which divides test's groups again among its test sets"
            )
        return self


class ShardedDemonstrationSettings(Settings):
    """The share of demonstrations whose request is told in parts; the expert answers each but the last with `question`
    and waits. A problem without parts is always told at once.
    """

    share: float = Field(gt=0, le=1)
    question: str = Field(min_length=1)


class CurateSettings(SplitSettings):
    """`num_probe_problems` are played again before each later stage, to see whether the tools still answer the same.
    `sharded` null: every demonstration has its whole request at once.
    """

    source: str = Field(min_length=1)
    num_generated: int = Field(ge=1)
    max_level: int = Field(ge=1)
    num_demonstrations: int = Field(ge=0)
    sharded: ShardedDemonstrationSettings | None
    num_probe_problems: int = Field(ge=0)


class CurateSections(Settings):
    seed: int = Field(ge=0)
    environment: EnvironmentSettings
    curate: CurateSettings
