"""Settings of the in-process engine: `engine.settings` where `engine.name` is transformers; null bounds nothing."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tasks.core.machine import GIB
from tasks.rollouts.settings import EngineSettings, OwnEngineSettings


class TransformersSettings(OwnEngineSettings):
    """`kv_cache_gib` bounds the keys and values of all episodes in flight; those beyond it wait their turn. Null
    settings have room for `engine.max_concurrent_episodes` of the longest.
    """

    may_be_null: ClassVar[bool] = True

    kv_cache_gib: float = Field(gt=0)


SETTINGS = TransformersSettings


def kv_cache_bytes(engine: EngineSettings) -> int | None:
    """None where nothing bounds it."""
    if engine.settings is None:
        return None
    assert isinstance(engine.settings, TransformersSettings)
    return int(engine.settings.kv_cache_gib * GIB)
