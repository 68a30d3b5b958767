"""Shapes of models: parameters as their makers count them, from a name, a folder or a config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tasks.models.files import INDEX
from tasks.models.settings import LoRASettings
from tasks.planning.shapes import (
    Experts,
    UnknownShape,
    config_shape,
    count_parameters,
    find_shape,
    known_name,
    known_shape,
)


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


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A model in two files, of 800 and 208 weights; its config.json would have 744."""
    from safetensors.numpy import save_file

    config = {"model_type": "llama", "vocab_size": 10, "tie_word_embeddings": True, "num_hidden_layers": 1,
              "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names = {"one": "model-00001-of-00002.safetensors", "two": "model-00002-of-00002.safetensors"}
    for name, size in (("one", 800), ("two", 208)):
        save_file({name: np.zeros(size, dtype=np.float32)}, tmp_path / names[name])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    (tmp_path / "vocab.json").write_text("{}", encoding="utf-8")
    return tmp_path


def test_of_a_folder_the_files_are_counted_that_are_loaded(shards: Path) -> None:
    """Mistral's folders have the same weights again in consolidated.safetensors."""
    shutil.copyfile(shards / "model-00001-of-00002.safetensors", shards / "consolidated.safetensors")
    assert find_shape(str(shards)).num_parameters == 1008


def test_a_download_that_was_broken_off_is_refused(shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    for read in (lambda: find_shape(str(shards)), lambda: count_parameters(shards)):
        with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors.*not whole"):
            read()


def test_a_folder_of_quantized_weights_is_refused(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 10, "quantization_config": {"quant_method": "awq"}, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnknownShape, match=r"quantized.* Take the model it was made from"):
        find_shape(str(tmp_path))


def test_a_name_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(UnknownShape, match=r"Qwen2\.5-7B"):
        find_shape("models/mine")
    with pytest.raises(UnknownShape, match="no hidden_size"):
        config_shape("mine", {"vocab_size": 10})


def test_an_adapter_has_rank_times_inputs_and_outputs() -> None:
    shape = known_shape("Qwen2.5-0.5B")
    lora = LoRASettings(rank=2, alpha=4, target_modules=["q_proj", "down_proj"])
    assert shape.adapter_parameters(lora) == 24 * 2 * ((896 + 896) + (4864 + 896))


def test_of_experts_memory_has_all_and_arithmetic_those_that_a_token_passes() -> None:
    """Qwen3-30B-A3B: 30.5 billion, of which 3.3 are active, its makers say; embeddings and head are in both."""
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    }  # fmt: skip
    shape = config_shape("mine", config)
    assert shape.experts == Experts(total=128, active=8, inner=768, shared=0)
    assert shape.num_parameters == 30_532_122_624
    assert round((shape.matrix_parameters + 2 * shape.head_parameters) / 1e9, 1) == 3.3
    # The same sizes with 8 experts, all of which every token passes, are a dense model of inner size 8 × 768.
    dense = config_shape("mine", config | {"num_experts": 8})
    assert (dense.experts, dense.matrix_parameters) == (None, shape.matrix_parameters)


def test_a_shared_expert_is_passed_by_every_token() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10}
    experts = {"moe_intermediate_size": 4, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1}
    shape = config_shape("mine", sizes | experts)
    assert (shape.experts, shape.inner) == (Experts(total=6, active=2, inner=4, shared=4), 12)
    assert shape.matrix_parameters == 4 * 64 + 3 * 8 * 12
    assert shape.expert_parameters == 6 * 3 * 8 * 4 + 6 * 8
    # Rank 1: attention's squares and the shared three; per expert 2 × (8 + 8) and 4 + 8; and the router.
    lora = LoRASettings(rank=1, alpha=2, target_modules="all-linear")
    assert shape.adapter_parameters(lora) == 4 * 16 + 3 * 12 + 6 * (2 * 16 + 12) + 14
