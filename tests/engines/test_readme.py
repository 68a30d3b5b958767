"""The YAML of the engines' page is what their settings accept."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tasks.rollouts.settings import EngineSettings
from tests.conftest import ROOT
from tests.readme import BLOCK

PAGE = (ROOT / "tasks" / "engines" / "README.md").read_text(encoding="utf-8")
BLOCKS: list[dict[str, Any]] = [yaml.safe_load(code) for name, code in BLOCK.findall(PAGE) if name == "yaml"]
EXAMPLES = [block for block in BLOCKS if "engine" in block]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda item: item["engine"]["name"])
def test_an_example_is_accepted_as_it_is(example: dict[str, Any]) -> None:
    assert list(example) == ["engine"]
    engine = EngineSettings(**example["engine"])
    assert engine.own.model_dump() == example["engine"]["settings"]


def test_vllm_is_shown_on_the_trainers_gpu_with_a_share_that_leaves_it_room() -> None:
    (shown,) = [example["engine"] for example in EXAMPLES if example["engine"]["name"] == "vllm"]
    assert shown["settings"]["mode"] == "in_process"
    assert shown["settings"]["gpu_memory_utilization"] == 0.4
