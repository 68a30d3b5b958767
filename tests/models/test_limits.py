"""What a config says of attention and positions, within an episode's limit; no model is made."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from tasks.models.limits import check_positions, limited_attention


@pytest.mark.parametrize(
    ("model_type", "changed", "reason"),
    [
        ("mistral", {"sliding_window": 100}, None),
        ("mistral", {"sliding_window": 99}, "sliding_window 99"),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window 8"),
        ("gemma3_text", {"sliding_window": 64}, "sliding_window 64"),
        ("gemma3_text", {"sliding_window": 512}, None),
        ("llama4_text", {"attention_chunk_size": 64}, "attention_chunk_size 64"),
        ("llama4_text", {"attention_chunk_size": 8192}, None),
        ("qwen3_next", {}, "linear_attention"),
        ("llama", {}, None),
    ],
)
def test_attention_is_limited_where_a_token_of_an_episode_may_not_see_another(
    model_type: str, changed: dict[str, Any], reason: str | None
):
    found = limited_attention(AutoConfig.for_model(model_type, **changed), max_tokens=100)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("rope", "original"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 100),
        ({"rope_type": "dynamic", "factor": 2.0}, 400),
        ({"rope_type": "linear", "factor": 2.0}, None),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, None),
    ],
)
def test_positions_that_depend_on_the_longest_are_refused_beyond_the_original_context(
    rope: dict[str, Any], original: int | None
):
    config = AutoConfig.for_model(
        "phi3" if rope["rope_type"] == "longrope" else "llama", hidden_size=64, num_attention_heads=4,
        max_position_embeddings=400, original_max_position_embeddings=100,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )  # fmt: skip
    if original is None:
        check_positions(config, max_tokens=400)
        return
    check_positions(config, max_tokens=original)
    with pytest.raises(ValueError, match="max_tokens_per_episode"):
        check_positions(config, max_tokens=original + 1)
