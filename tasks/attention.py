"""The attention function the engine and the trainer run a Hugging Face model with, through transformers' own extension
point.

Shapes: N rows, K key-value heads, G query heads a key-value head, T positions, D head size, Q query length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "turnwise"


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over grouped heads without repeating keys and values; query [N, K·G, Q, D], key and value [N, K, T, D].

    Without a mask, torch's own causal kernel. With one (additive, [N, 1, Q, T]) and one query a row, two batched matrix
    products over the cache's views: transformers' sdpa path copies each key and value G times first, which at decode
    costs more than the arithmetic.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None or query.shape[2] > 1:
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        return output.transpose(1, 2), None
    num_rows, num_heads, _, head_size = query.shape
    grouped = query.view(num_rows, key.shape[1], num_heads // key.shape[1], head_size)
    scores = torch.matmul(grouped, key.transpose(-1, -2)).mul_(scaling).add_(attention_mask)
    output = torch.matmul(scores.softmax(-1), value)
    return output.view(num_rows, 1, num_heads, head_size), None


def register_attention() -> None:
    """Make `attn_implementation="turnwise"` known to transformers; harmless to repeat."""
    AttentionInterface.register(ATTENTION, grouped_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
