"""`engine` in params: a folder by name, with settings of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.core.settings import Settings, load
from tasks.engines.transformers.settings import kv_cache_bytes
from tasks.rollouts.settings import EngineSettings, SamplingSettings
from tests import tiny
from tests.engine_benches import vllm_settings


class Sections(Settings):
    engine: EngineSettings


def read(**changed: Any) -> EngineSettings:
    engine = {"name": "transformers", "max_concurrent_episodes": 1, "probe_tolerance": 0.1, "settings": None}
    return load(Sections, {"engine": engine | changed}).engine


def vllm(**changed: Any) -> dict[str, Any]:
    return vllm_settings(Path("w")).model_dump(mode="json") | changed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "endpoint"}, ["engine.name", "baseline", "transformers, vllm"]),
        ({"name": "scripted"}, ["engine.name", "no weights", "transformers, vllm"]),
        ({"name": "../x"}, ["engine.name", "no folder", "transformers, vllm"]),
        ({"settings": {"kv_cache_gib": 1.0, "dtype": "float32"}}, ["engine.settings.dtype", "not a setting"]),
        ({"settings": {"kv_cache_gib": 0.0}}, ["engine.settings.kv_cache_gib = 0.0"]),
        ({"name": "vllm"}, ["engine.settings", "null", "dtype"]),
        ({"name": "vllm", "settings": vllm(dtpye="float32")}, ["engine.settings.dtpye", "Did you mean dtype"]),
        ({"name": "vllm", "settings": vllm(num_servers=0)}, ["engine.settings.num_servers = 0"]),
        ({"name": "vllm", "settings": vllm(urls=["http://a:1"])}, ["engine.settings", "mode: server"]),
    ],
)
def test_a_mistake_is_one_line_with_its_key(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        read(**changed)
    line = str(caught.value)
    assert "\n" not in line
    assert [word for word in words if word not in line] == []


class Limits(Settings):
    sampling: SamplingSettings


@pytest.mark.parametrize(("most", "thought"), [(2048, 2048), (100, 2048)])
def test_a_completion_has_room_for_more_than_one_thought(most: int, thought: int) -> None:
    """Or the first full thought would end the episode. One token more is a limit; no limit of either is one too."""
    given = tiny.SAMPLING.model_dump()
    limits = {"max_completion_tokens": most, "max_thinking_tokens_per_turn": thought}
    with pytest.raises(ValueError, match=rf"sampling.*{most}.*{thought}.*Set sampling.max_completion_tokens") as caught:
        load(Limits, {"sampling": given | limits})
    assert "\n" not in str(caught.value)
    for rest in ({"max_completion_tokens": thought + 1}, {"max_completion_tokens": None}):
        load(Limits, {"sampling": given | limits | rest})
    load(Limits, {"sampling": given | limits | {"max_thinking_tokens_per_turn": None}})


def test_the_cache_of_the_engine_in_process_may_be_bounded() -> None:
    assert kv_cache_bytes(read(settings={"kv_cache_gib": 1.5})) == 3 * 2**29
    assert kv_cache_bytes(read(settings=None)) is None


def test_what_is_read_comes_back_from_what_is_written() -> None:
    read_first = read(name="vllm", settings=vllm())
    assert read(**read_first.model_dump(mode="json")) == read_first
