"""The worlds by name. One line adds a world; its module is imported only when a profile asks for it."""

from __future__ import annotations

import importlib
from typing import Any

from tasks.tools.base import Environment
from tasks.tools.settings import EnvironmentSettings

WORLDS = {
    "travel_desk": "tasks.environments.travel_desk.environment:TravelDesk",
    "mcp": "tasks.environments.mcp.environment:MCPEnvironment",
    "bfcl": "tasks.environments.bfcl.environment:BFCL",
}


def load_environment(settings: EnvironmentSettings) -> Environment:
    """The world a profile names, with what `environment` asks for around it, from the inside out: faults of ours on
    purpose, retries, the tool cache, and the faults that the model is meant to meet.
    """
    world_class = _world_class(settings)
    environment: Environment
    if settings.cache.mode == "off":
        environment = _reliable(world_class, settings)
    else:
        from tasks.tools.cache.environment import CachedEnvironment

        environment = CachedEnvironment(
            settings, world_class=world_class, make=lambda: _reliable(world_class, settings)
        )
    if settings.faults is not None:
        from tasks.tools.faults import DegradedEnvironment

        environment = DegradedEnvironment(environment, settings.faults)
    return environment


def load_world(settings: EnvironmentSettings, *, with_cache: bool = False) -> Environment:
    """The world as it is, without faults on purpose: what problems are curated in, and what is pinned."""
    cache = settings.cache if with_cache else settings.cache.model_copy(update={"mode": "off"})
    return load_environment(settings.model_copy(update={"faults": None, "cache": cache}))


def _reliable(world_class: type[Any], settings: EnvironmentSettings) -> Environment:
    """The world itself, its faults absorbed as far as retries can."""
    environment: Environment = world_class.from_settings(settings)
    if settings.faults is not None:
        from tasks.tools.faults import FailingEnvironment

        environment = FailingEnvironment(environment, settings.faults)
    if settings.tools.max_retries:
        from tasks.tools.retries import RetryingEnvironment

        environment = RetryingEnvironment(environment, settings.tools)
    return environment


def _world_class(settings: EnvironmentSettings) -> type[Any]:
    """The class of the bare world; ValueError with the known names for one that is not in the catalog."""
    check_world_name(settings.name)
    module_name, class_name = WORLDS[settings.name].split(":")
    return getattr(importlib.import_module(module_name), class_name)


def check_world_name(name: str) -> None:
    """ValueError with the known names for a world that is not in the catalog."""
    if name not in WORLDS:
        raise ValueError(
            f"environment.name = {name!r} is not in the catalog, so there are no tools to call. "
            f"Choose one of: {', '.join(sorted(WORLDS))}."
        )
