"""The `environment` section of params: which folder, its own settings, and the wrappers around it.

A folder's `settings.py`, if there is one, assigns its settings class to SETTINGS. It is imported to check params, so it
imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny, ValidationInfo, field_validator, model_validator

from tasks.core.settings import Settings, read_own_settings
from tasks.tools.judge.settings import JudgeSettings
from tasks.tools.settings import CacheSettings, FaultSettings, ToolSettings

ROOM = "tasks.environments"


class EnvironmentSettings(Settings):
    """`settings` are the environment's own, null if it has none; the others configure the wrappers."""

    name: str
    settings: SerializeAsAny[Settings] | None
    tools: ToolSettings
    cache: CacheSettings
    faults: FaultSettings | None
    judge: JudgeSettings | None

    @field_validator("name")
    @classmethod
    def _is_a_folder(cls, name: str) -> str:
        check_environment_name(name)
        return name

    @field_validator("settings", mode="before")
    @classmethod
    def _read_as_the_environment_says(cls, given: Any, info: ValidationInfo) -> Settings | None:
        name = info.data.get("name")
        return read_own_settings(ROOM, name, given) if name else None

    @model_validator(mode="after")
    def _somebody_decides(self) -> EnvironmentSettings:
        if getattr(self.settings, "needs_judge", False) and not (self.judge and self.judge.decides):
            raise ValueError(
                "settings.checker is null, so only a judge can say whether an episode succeeded, and there is none "
                "that decides. Name a function as settings.checker, or fill in judge with decides: true"
            )
        return self


def check_environment_name(name: str) -> None:
    """ValueError with the valid names if there is no such folder."""
    if name not in environment_names():
        raise ValueError(
            f"there is no folder {name!r} in tasks/environments/, so there are no tools to call. Choose one of: "
            f"{', '.join(environment_names())}"
        )


def environment_names() -> list[str]:
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/environment.py"))
