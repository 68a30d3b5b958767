"""Settings of a world as tests want them: no pause, much patience, nothing is cached, no fault is added."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.core.records import ToolCall
from tasks.core.settings import Settings
from tasks.environments import settings as environments
from tasks.environments.settings import EnvironmentSettings
from tasks.tools.base import Episode, ToolReply, block_until
from tasks.tools.settings import CacheSettings, ToolSettings

QUICK = ToolSettings(
    timeout_seconds=120,  # of a busy machine; a test that waits for the end of it sets its own
    max_reply_characters=2000,
    max_calls_per_turn=16,
    max_workers=4,
    max_retries=2,
    backoff_seconds=0.001,
    max_attempts=3,
    max_dropped_share=1.0,
)


NO_BUDGETS = {
    "max_turns": None, "max_tokens_per_turn": None, "max_tokens_per_episode": None, "max_completion_tokens": None,
}  # fmt: skip


def member(name: str, settings: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    """One environment of a mixture, as params give it; `changed` are other keys of it."""
    parts = {"name": name, "settings": settings, "source": None, "max_level": None, "label": None, "share": 1.0}
    return {**parts, "budgets": NO_BUDGETS, **changed}


TWO_WORLDS = {
    "members": [
        member("travel_desk"),
        member("bfcl", {"categories": ["multi_turn_base"], "turns": "first"}, max_level=20),
    ]
}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "agent": {
        "command": [sys.executable],
        "object": None,
        "environment": {},
        "models": ["policy"],
        "deadline_seconds": 60.0,
        "world": {"name": "travel_desk", "settings": None},
        "verdict": None,
    },
    "bfcl": {"categories": ["multi_turn_base"], "turns": "first"},
    "tau2": {"domain": "telecom", "problems": "base"},
    "mixture": TWO_WORLDS,
    "research": {
        "corpus": None,
        "generated": {"seed": 1, "num_clusters": 20},
        "num_results": 3,
        "snippet_characters": 24,
        "page_characters": 2000,
        "max_searches": 6,
        "max_characters": 4000,
        "citations": "some",
    },
}


def as_custom(module: str) -> str:
    """A module of the tests under a name in tasks/custom, from where alone checkers are loaded."""
    name = f"tasks.custom.{module.rpartition('.')[2]}"
    sys.modules[name] = importlib.import_module(module)
    return name


def environment_settings(name: str = "travel_desk", **changed: Any) -> EnvironmentSettings:
    """The `environment` section for one environment, which may be added later; `changed` replaces parts of it."""
    cache = {"mode": "off", "folder": "artifacts/.tool_cache", "frozen": None}
    known = name if name in environments.environment_names() else "travel_desk"
    parts: dict[str, Any] = {
        "name": known,
        "settings": OWN_SETTINGS.get(name),
        "tools": QUICK,
        "cache": cache,
        "faults": None,
        "judge": None,
        "user": None,
        "pool": None,
    }
    return EnvironmentSettings.model_validate({**parts, **changed}).model_copy(update={"name": name})


def cache_settings(mode: str, folder: Path, frozen: Path | None = None) -> CacheSettings:
    """A cache of a test's own; its frozen file need not be in tasks/custom."""
    cache = CacheSettings.model_validate({"mode": mode, "folder": str(folder), "frozen": None})
    return cache.model_copy(update={"frozen": frozen and str(frozen)})


def add_environment(
    patch: pytest.MonkeyPatch, name: str, environment_class: type[Any], settings_class: type[Settings] | None = None
) -> None:
    """As if tasks/environments/ had one more folder."""
    names = [*environments.environment_names(), name]
    patch.setattr(environments, "environment_names", lambda: names)
    settings = settings_class and SimpleNamespace(SETTINGS=settings_class)  # None: there is no such module
    for part, module in (("environment", SimpleNamespace(ENVIRONMENT=environment_class)), ("settings", settings)):
        patch.setitem(sys.modules, f"{environments.ROOM}.{name}.{part}", cast(Any, module))


def answer_calls(episode: Episode, calls: list[ToolCall | None]) -> Iterator[ToolReply]:
    """The environment's reply to each call of one message, in order, waited for."""
    for call in calls:
        yield block_until(episode.malformed_call() if call is None else episode.call(call.name, call.arguments))
