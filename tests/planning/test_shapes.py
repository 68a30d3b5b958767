"""Shapes of models: parameters as their makers count them, from a name, a folder or a config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.learning.shared.settings import LoRASettings
from tasks.planning.shapes import UnknownShape, config_shape, find_shape, known_name, known_shape


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Qwen3-4B", 4_022_468_096),
        ("Llama-3.1-8B", 8_030_261_248),
    ],
)
def test_a_known_model_has_the_parameters_its_published_weights_have(name: str, num_parameters: int) -> None:
    assert known_shape(name).num_parameters == num_parameters


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen3-4B"),
        ("qwen2.5-0.5b", "Qwen2.5-0.5B"),
        ("models/mine", None),
    ],
)
def test_a_path_or_a_hubs_name_means_the_known_model(path: str, name: str | None) -> None:
    assert known_name(path) == name


def test_a_folder_is_read_and_needs_no_weights(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 10, "tie_word_embeddings": True, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # A layer: 4 squares of 8, 3 matrices of 8 × 16, two norms; then the embeddings and the last norm.
    assert find_shape(str(tmp_path)).num_parameters == 2 * (4 * 64 + 3 * 128 + 16) + 80 + 8


def test_a_name_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(UnknownShape, match=r"Qwen2\.5-7B"):
        find_shape("models/mine")
    with pytest.raises(UnknownShape, match="no hidden_size"):
        config_shape("mine", {"vocab_size": 10})


def test_an_adapter_has_rank_times_inputs_and_outputs() -> None:
    shape = known_shape("Qwen2.5-0.5B")
    lora = LoRASettings(rank=2, alpha=4, target_modules=["q_proj", "down_proj"])
    assert shape.adapter_parameters(lora) == 24 * 2 * ((896 + 896) + (4864 + 896))
