"""Attention with what torch's fused kernel has not: a soft cap on scores (Gemma 2) and sinks (gpt-oss).

A sink is one learnt score per head that takes part in the softmax and has no value. Scores are written out, so memory
is that of queries times keys per head. With FlexAttention both are exact and cost next to nothing. Shapes as in
attention.py; H query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Tensor]  # as torch's scaled_dot_product_attention
FUSED: Kernel = torch.nn.functional.scaled_dot_product_attention


def choose_kernel(*, softcap: float | None, sinks_H: Tensor | None) -> Kernel:
    return FUSED if softcap is None and sinks_H is None else partial(_attend, softcap=softcap, sinks_H=sinks_H)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softcap: float | None,
    sinks_H: Tensor | None,
    scale: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = True,
) -> Tensor:
    """query [N, H, Q, D], key and value [N, K, T, D], a mask of booleans or of terms [N or 1, 1, Q, T]; as query."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()[None, None]
    scores = scores if attn_mask is None else _hide(scores, attn_mask[:, :, None])
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, *grouped.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(query.dtype)
    return torch.matmul(weights, value[:, :, None]).flatten(1, 2)


def _hide(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def attend_in_blocks(
    flex: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: Any,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """The same by FlexAttention. What a sink takes from all values is known from the log-sum of their scores."""
    from torch.nn.attention.flex_attention import AuxRequest

    options = {"block_mask": block_mask, "scale": scale, "enable_gqa": True}
    if softcap is not None:
        options["score_mod"] = partial(_cap, softcap)
    if sinks_H is None:
        output: Tensor = flex(query, key, value, **options)
        return output
    output, found = flex(query, key, value, **options, return_aux=AuxRequest(lse=True))
    return output * torch.sigmoid(found.lse - sinks_H[:, None])[..., None].to(output.dtype)


def _cap(softcap: float, score: Tensor, *_place: Tensor) -> Tensor:
    return softcap * torch.tanh(score / softcap)
