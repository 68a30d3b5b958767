"""Finds an environment by name: `environment.name` in params is a folder of this room.

The folder has `environment.py`, which names its class as ENVIRONMENT, and `settings.py`, which names the class of its
own settings as SETTINGS where it has any. Both are imported only when params name the folder.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny, ValidationInfo, field_validator

from tasks.core.settings import Settings
from tasks.tools.base import Environment
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
        if name not in environment_names():
            raise ValueError(
                f"there is no folder {name!r} in tasks/environments/, so there are no tools to call. Choose one of: "
                f"{', '.join(environment_names())}"
            )
        return name

    @field_validator("settings", mode="before")
    @classmethod
    def _read_as_the_environment_says(cls, given: Any, info: ValidationInfo) -> Settings | None:
        name = info.data.get("name")
        settings_class = find_settings_class(name) if name else None
        if settings_class is None:
            if given is not None and name:
                raise ValueError(f"{name} has no settings, so these would have no effect. Write null")
            return None
        if given is None:
            raise ValueError(f"it is null, and {name} needs settings: {', '.join(settings_class.model_fields)}")
        return settings_class.read(given)


def environment_names() -> list[str]:
    """The folders of this room."""
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/environment.py"))


def find_environment_class(settings: EnvironmentSettings) -> type[Any]:
    """The class that `environment.py` of the folder names."""
    found: type[Any] = importlib.import_module(f"{ROOM}.{settings.name}.environment").ENVIRONMENT
    return found


def find_settings_class(name: str) -> type[Settings] | None:
    """The class that `settings.py` of the folder names; None where the environment has no settings."""
    module = f"{ROOM}.{name}.settings"
    try:
        found: type[Settings] | None = importlib.import_module(module).SETTINGS
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
    return found


def load_environment(settings: EnvironmentSettings) -> Environment:
    """The environment that params name, with what they ask for around it, from the inside out: faults of ours on
    purpose, retries, the tool cache, and the faults that the model is meant to meet.
    """
    environment_class = find_environment_class(settings)
    environment: Environment
    if settings.cache.mode == "off":
        environment = _make_reliable(environment_class, settings)
    else:
        from tasks.tools.cache.environment import CachedEnvironment

        environment = CachedEnvironment(
            settings.name,
            environment_class,
            lambda: _make_reliable(environment_class, settings),
            settings=settings.settings,
            limits=settings.tools,
            cache=settings.cache,
        )
    if settings.faults is not None:
        from tasks.tools.faults import DegradedEnvironment

        environment = DegradedEnvironment(environment, settings.faults)
    return environment


def load_bare_environment(settings: EnvironmentSettings, *, with_cache: bool = False) -> Environment:
    """The environment without faults on purpose: curation and drift probes play it so."""
    cache = settings.cache if with_cache else settings.cache.model_copy(update={"mode": "off"})
    return load_environment(settings.model_copy(update={"faults": None, "cache": cache}))


def _make_reliable(environment_class: type[Any], settings: EnvironmentSettings) -> Environment:
    """The environment itself; retries absorb its faults as far as they can."""
    environment: Environment = environment_class.from_settings(settings.settings, settings.tools)
    if settings.faults is not None:
        from tasks.tools.faults import FailingEnvironment

        environment = FailingEnvironment(environment, settings.faults)
    if settings.tools.max_retries:
        from tasks.tools.retries import RetryingEnvironment

        environment = RetryingEnvironment(environment, settings.tools)
    return environment
