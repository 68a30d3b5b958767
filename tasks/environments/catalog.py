"""The worlds by name. One line adds a world; its module is imported only when a profile asks for it."""

from __future__ import annotations

import importlib

from pydantic import Field

from tasks.environments.base import Environment
from tasks.settings import Settings

WORLDS = {
    "travel_desk": "tasks.environments.travel_desk:TravelDesk",
}


class EnvironmentSettings(Settings):
    """Which world the agent works in."""

    name: str = Field(min_length=1)


def load_environment(settings: EnvironmentSettings) -> Environment:
    """The world a profile names; ValueError with the known names for any other."""
    if settings.name not in WORLDS:
        raise ValueError(
            f"environment.name = {settings.name!r} is not in the catalog, so there are no tools to call. "
            f"Choose one of: {', '.join(sorted(WORLDS))}."
        )
    module_name, class_name = WORLDS[settings.name].split(":")
    return getattr(importlib.import_module(module_name), class_name)()
