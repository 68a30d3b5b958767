"""A model that trainer or engine would compute as another is refused by its config.json, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.planning.family import check_family
from tests.profiles import profile_params

WINDOWED = {"model_type": "mistral", "sliding_window": 100}
DYNAMIC = {
    "model_type": "llama", "max_position_embeddings": 100, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


def params(folder: Path, config: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The demo's, with a model folder that holds a config.json alone, and episodes of up to 200 tokens."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    values = profile_params("demo")
    values["model"]["path"] = str(folder)
    values["sampling"]["max_tokens_per_episode"] = 200
    for name, value in changed.items():
        section, key = name.split("__")
        values[section][key] = value
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "changed", "reason", "remedy"),
    [
        (WINDOWED, {}, "train.packing: tree", "Set train.packing: none"),
        (WINDOWED, {"train__packing": "none"}, "sliding_window 100", "Set engine.name: vllm"),
        ({"model_type": "mistral", "sliding_window": 200}, {}, None, None),
        ({"model_type": "qwen3_next"}, {}, "linear_attention", "Set train.packing: none"),
        ({"model_type": "gemma2"}, {}, None, None),  # the family's window of 4096, which the file leaves out
        ({"model_type": "gpt_oss"}, {}, "sliding_window 128", "Set train.packing: none"),
        (DYNAMIC, {"train__packing": "none"}, "dynamic", "at most 100"),
        ({"model_type": "qwen2"}, {}, None, None),
    ],
)
def test_a_config_says_what_cannot_be_trained_or_played(
    tmp_path: Path, config: dict[str, Any], changed: dict[str, Any], reason: str | None, remedy: str | None
) -> None:
    if reason is None or remedy is None:
        check_family(params(tmp_path, config, **changed))
        return
    with pytest.raises(ValueError, match=reason) as error:
        check_family(params(tmp_path, config, **changed))
    assert remedy in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_window_is_no_matter_where_rows_are_not_packed_and_vllm_plays(tmp_path: Path) -> None:
    values = params(tmp_path, WINDOWED, train__packing="none")
    values["engine"] = profile_params("bfcl_qwen2.5_7b")["engine"]
    check_family(values)


def test_the_embedded_model_and_one_that_is_not_there_are_not_looked_at(tmp_path: Path) -> None:
    check_family(profile_params("demo"))
    values = profile_params("demo")
    values["model"]["path"] = str(tmp_path / "missing")
    check_family(values)
