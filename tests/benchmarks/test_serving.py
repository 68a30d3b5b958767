"""What a change of models costs those who ask: 8 clients, two changes, the in-process engine and vLLM.

Writes artifacts/bench/serving.json: requests, failures, and the longest time in which no reply came, around a change
and elsewhere. The model is tiny, so these are the costs of the change and not of a model.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.serve.serving import Keys, Serving
from tasks.core.files import read_json, write_json
from tasks.rollouts.settings import PlaySettings
from tests import tiny
from tests.benchmarks.machine import cpu_model
from tests.commands.serve.alias import NAME, Alias
from tests.commands.serve.clients import Load, until
from tests.commands.serve.conftest import PLAY, SETTINGS
from tests.conftest import FIGURES
from tests.engine_benches import engine_settings, vllm_settings

pytestmark = pytest.mark.bench
REPLIES = 300  # before, between and after the changes


def play_with(engine: str, folder: Path) -> PlaySettings:
    own = vllm_settings(folder / "weights") if engine == "vllm" else None
    return PLAY.model_copy(update={"engine": engine_settings(engine, own)})


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_no_request_fails_while_models_change(engine: str, tmp_path: Path) -> None:
    embedded = tiny.EMBEDDED.model_copy(update=tiny.HEADS_FOR_VLLM)
    models = [tiny.model_folder(tmp_path / str(seed), seed=seed, embedded=embedded) for seed in (0, 1)]
    alias, gaps = Alias(models[0]), dict[str, float]()
    with Serving(alias, play_with(engine, tmp_path), SETTINGS, keys=Keys(), record=None) as serving:
        with Load(serving.gateway.url, NAME, count=8) as load:
            gaps["steady"] = longest_gap(load, REPLIES)
            for number, folder in enumerate((models[1], models[0]), start=1):
                alias.folder = folder
                serving.watcher.look_again()
                before = load.num_answered
                gaps[f"change_{number}"] = longest_gap(
                    load, REPLIES, also=lambda number=number: serving.watcher.num_changes == number
                )
                assert load.num_answered > before
        answered, changes = load.num_answered, serving.watcher.num_changes

    assert load.failed == [] and changes == 2
    file = FIGURES / "serving.json"
    found: dict[str, Any] = read_json(file) if file.exists() else {}
    row = {name: round(seconds, 3) for name, seconds in gaps.items()}
    write_json(
        file, found | {"machine": cpu_model(), engine: {"answered": answered, "failed": 0, "longest_gap_seconds": row}}
    )


def longest_gap(load: Load, replies: int, also: Any = lambda: True) -> float:
    """Seconds between two replies, over the next `replies` of them and until `also`."""
    begun, seen, last, longest = load.num_answered, load.num_answered, time.perf_counter(), 0.0

    def is_over() -> bool:
        nonlocal seen, last, longest
        now, found = time.perf_counter(), load.num_answered
        longest = max(longest, now - last)
        if found > seen:
            seen, last = found, now
        return found - begun >= replies and also()

    until(is_over)
    return longest
