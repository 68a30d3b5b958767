"""Models of the families and of the sizes that our C code has to get right, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tasks.models.attention import ATTENTION, register_attention

KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
# Sizes that are and are not whole vectors, panels or pairs of queries; heads that are wider than the model.
SIZES = [
    {"hidden_size": 64, "intermediate_size": 96, "heads": 4, "key_heads": 2, "head_dim": 16, "vocab_size": 160},
    {"hidden_size": 36, "intermediate_size": 50, "heads": 3, "key_heads": 1, "head_dim": 12, "vocab_size": 101},
    {"hidden_size": 40, "intermediate_size": 17, "heads": 5, "key_heads": 5, "head_dim": 6, "vocab_size": 67},
    {"hidden_size": 24, "intermediate_size": 130, "heads": 4, "key_heads": 1, "head_dim": 64, "vocab_size": 40},
]


def a_model(kind: str, sizes: dict[str, int], *, seed: int = 0, **more: Any) -> PreTrainedModel:
    """Random weights, those of norms and biases too."""
    register_attention()
    given = dict(sizes)
    config_class, model_class = KINDS[kind]
    config = config_class(
        num_hidden_layers=2, num_attention_heads=given.pop("heads"), num_key_value_heads=given.pop("key_heads"),
        max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=None, **given, **more,
    )  # fmt: skip
    config._attn_implementation = ATTENTION
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3).add_(1.0 if parameter.dim() == 1 else 0.0)
    return model


def compute_attention_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama as a later transformers may compute it: here every attention output is a tenth larger."""
    attention = transformers.models.llama.modeling_llama.LlamaAttention
    forward = attention.forward

    def changed(self: Any, *arguments: Any, **named: Any) -> Any:
        output, weights = forward(self, *arguments, **named)
        return 1.1 * output, weights

    monkeypatch.setattr(attention, "forward", changed)
