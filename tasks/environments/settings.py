"""The `environment` section of params: a folder of this room by name, its own settings, and what is put around it.

The folder's `settings.py`, where it has one, names the class of its own settings as SETTINGS. It is imported when
params are checked, so that a mistake is found before anything runs; it imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny, ValidationInfo, field_validator

from tasks.core.settings import Settings, read_own_settings
from tasks.tools.settings import CacheSettings, FaultSettings, ToolSettings

ROOM = "tasks.environments"


class EnvironmentSettings(Settings):
    """Which environment, the settings of its own (null where it has none), and what turnwise puts around it."""

    name: str
    settings: SerializeAsAny[Settings] | None
    tools: ToolSettings
    cache: CacheSettings
    faults: FaultSettings | None

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


def check_environment_name(name: str) -> None:
    """ValueError with the names there are for one that is no folder of this room."""
    if name not in environment_names():
        raise ValueError(
            f"there is no folder {name!r} in tasks/environments/, so there are no tools to call. Choose one of: "
            f"{', '.join(environment_names())}"
        )


def environment_names() -> list[str]:
    """The folders of this room."""
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/environment.py"))
