"""The `environment` section of params: which folder, its own settings, and the wrappers around it.

A folder's `settings.py`, if there is one, assigns its settings class to SETTINGS. It is imported to check params, so it
imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from tasks.core.settings import Settings, read_own_settings
from tasks.tools.judge.settings import JudgeSettings
from tasks.tools.settings import CacheSettings, FaultSettings, PoolSettings, ToolSettings, check_is_custom
from tasks.tools.user.settings import UserSettings

ROOM = "tasks.environments"


class NamedEnvironment(Settings):
    """A folder of tasks/environments/, and the environment's own settings, null if it has none."""

    name: str
    settings: SerializeAsAny[Settings] | None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        check_environment_name(name)
        return name

    @field_validator("settings", mode="before")
    @classmethod
    def _read_own_settings(cls, given: Any, info: ValidationInfo) -> Settings | None:
        name = info.data.get("name")
        return read_own_settings(ROOM, name, given) if name else None


class EnvironmentSettings(NamedEnvironment):
    """What params hold beside that configures the wrappers."""

    tools: ToolSettings
    cache: CacheSettings
    faults: FaultSettings | None
    judge: JudgeSettings | None
    user: UserSettings | None
    pool: PoolSettings | None

    @model_validator(mode="after")
    def _refuse_no_verdict(self) -> EnvironmentSettings:
        self.refuse_no_verdict()
        return self

    @model_validator(mode="after")
    def _check_judge_and_user(self) -> EnvironmentSettings:
        if self.user and not self.is_told_at_once:
            remedy = "Set user.reveal to at_once, or user to null"
            self.refuse_parts(of=f"user.reveal: {self.user.reveal}", remedy=remedy)
        self.refuse_asking_back()
        return self

    @model_validator(mode="after")
    def _refuse_no_user(self) -> EnvironmentSettings:
        self.refuse_no_user()
        return self

    @property
    def is_told_at_once(self) -> bool:
        """Whether an episode begins with the whole request."""
        return self.user is None or self.user.reveal == "at_once"

    @property
    def has_agent(self) -> bool:
        """Whether an agent that drives itself plays some of its episodes."""
        return any(getattr(named.settings, "drives_itself", False) for named in (self, *members_of(self)))

    def refuse_parts(self, *, of: str, remedy: str) -> None:
        """ValueError where the setting `of` tells a request in parts to an environment that judges after each message:
        a part has no reference of its own. In a mixture only problems that state parts are told so.
        """
        if getattr(self.settings, "judges_each_turn", False):
            raise ValueError(
                f"{of} tells a request in several messages, and {self.name} judges what was done after each, so such "
                f"an episode would fail. {remedy}"
            )

    def refuse_no_user(self) -> None:
        """ValueError where nobody would speak; also for an environment that took the place of another."""
        names = [played.name for played in members_of(self) if getattr(played.settings, "needs_user", False)]
        if names and self.user is None:
            raise ValueError(
                f"environment.user is null, and these problems of {names[0]} are conversations, so nobody would answer "
                f"the agent. Fill in environment.user, as tasks/tools/user/README.md shows"
            )

    def refuse_asking_back(self) -> None:
        """ValueError where a user who answers questions meets problems that are judged after each of its messages; also
        for an environment that took the place of another.
        """
        names = [played.name for played in members_of(self) if getattr(played.settings, "judges_each_turn", False)]
        if names and self.user is not None and self.user.played_by != "script":
            raise ValueError(
                f"user.played_by: {self.user.played_by} answers what the agent asks, and {names[0]} judges what was "
                f"done after each message of its user, so the answer to a question would count as the next request. "
                f"Set user.played_by to script, or leave {names[0]} out"
            )

    def further_code(self) -> list[str]:
        """Folders of code that its episodes run and its name does not tell, relative to the root: of a mixture's
        members.
        """
        return list(dict.fromkeys(folder_of(played.name) for played in members_of(self) if played is not self))

    def refuse_no_verdict(self) -> None:
        """ValueError where nothing decides on success; also for one that took the place of another."""
        instead = getattr(self.settings, "instead_of_judge", None)
        if instead is not None and not (self.judge and self.judge.decides):
            raise ValueError(
                f"only a judge can say whether an episode succeeded, and there is none that decides. Fill in judge "
                f"with decides: true, or {instead}"
            )


class BudgetSettings(Settings):
    """Budgets of one environment's episodes, as in `sampling`; null is the budget there."""

    max_turns: int | None = Field(ge=1)
    max_tokens_per_turn: int | None = Field(ge=1)
    max_tokens_per_episode: int | None = Field(ge=2)
    max_completion_tokens: int | None = Field(ge=1)

    def given(self) -> dict[str, int]:
        return {name: value for name, value in self.model_dump().items() if value is not None}


class OtherEnvironmentSettings(NamedEnvironment):
    """An environment beside or within the `environment` section, whose tools, cache and faults it shares.

    `source` is a JSONL file of problems in tasks/custom, null where the environment writes its own, of at most
    `max_level` (null: curate's).
    """

    source: str | None
    max_level: int | None = Field(ge=1)
    budgets: BudgetSettings

    @field_validator("source")
    @classmethod
    def _check_source_is_watched(cls, source: str | None) -> str | None:
        if source is not None:
            check_is_custom(source)
        return source

    def within(self, section: EnvironmentSettings) -> EnvironmentSettings:
        """The section with this environment in the place of its own."""
        return section.model_copy(update={"name": self.name, "settings": self.settings})


def members_of(section: EnvironmentSettings) -> Sequence[EnvironmentSettings | OtherEnvironmentSettings]:
    """What a section plays: its own environment, or those of its mixture."""
    return getattr(section.settings, "members", None) or [section]


def folder_of(name: str) -> str:
    """Where the code of an environment is, relative to the root."""
    return f"{ROOM.replace('.', '/')}/{name}"


def check_environment_name(name: str) -> None:
    """ValueError with the valid names if there is no such folder."""
    if name not in environment_names():
        raise ValueError(
            f"there is no folder {name!r} in tasks/environments/, so there are no tools to call. Choose one of: "
            f"{', '.join(environment_names())}"
        )


def environment_names() -> list[str]:
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/environment.py"))
