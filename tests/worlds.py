"""Settings of a world as tests want them: no pause, much patience, nothing is cached, no fault is added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.core.records import ToolCall
from tasks.tools.base import Episode, ToolReply, wait
from tasks.tools.settings import EnvironmentSettings, ToolSettings

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


def environment_settings(name: str = "travel_desk", **changed: Any) -> EnvironmentSettings:
    """The `environment` section for one world; `changed` replaces whole parts of it."""
    cache = {"mode": "off", "folder": "artifacts/.tool_cache", "frozen": "tasks/tools/cache/environment.py"}
    parts: dict[str, Any] = {"name": name, "tools": QUICK, "cache": cache, "faults": None, "mcp": None, "bfcl": None}
    return EnvironmentSettings.model_validate({**parts, **changed})


def answer_calls(episode: Episode, calls: list[ToolCall | None]) -> Iterator[ToolReply]:
    """The environment's reply to each call of one message, in order, waited for."""
    for call in calls:
        yield episode.malformed_call() if call is None else wait(episode.call(call.name, call.arguments))
