"""A soft cap and sinks: by written-out scores and by FlexAttention they are what the families' own attention computes.

FlexAttention runs here uncompiled and forward only, as a CPU can.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from tasks.models import attention
from tasks.models.scored_attention import FUSED, attend_in_blocks, choose_kernel

SOFTCAP, SCALE, LENGTH = 0.7, 0.5, 6


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query of 4 heads, key and value of 2, and a sink per head."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 16), (4,))
    query, key, value, sinks = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value, sinks


def causal() -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]


def test_a_sink_takes_its_share_and_gives_no_value():
    """Scores 0 and 0 and a sink of ln 2: half of the softmax is the sink's, a quarter each of the two values."""
    query, key, value = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2), torch.tensor([[[[4.0, 0.0], [0.0, 8.0]]]])
    kernel = choose_kernel(softcap=None, sinks_H=torch.tensor([math.log(2)]))
    assert torch.allclose(kernel(query, key, value, scale=1.0)[0, 0, 0], torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("mask", ["causal", "terms", "booleans"])
def test_a_soft_cap_is_gemma_2s_and_sinks_are_gpt_osss(mask: str):
    query, key, value, sinks = tensors()
    options = {
        "causal": {"is_causal": True},
        "terms": {"attn_mask": causal()},
        "booleans": {"attn_mask": causal() == 0},
    }
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    gemma, _ = modeling_gemma2.eager_attention_forward(
        module, query, key, value, causal(), scaling=SCALE, softcap=SOFTCAP
    )
    oss, _ = modeling_gpt_oss.eager_attention_forward(module, query, key, value, causal(), scaling=SCALE)
    capped, sunk = choose_kernel(softcap=SOFTCAP, sinks_H=None), choose_kernel(softcap=None, sinks_H=sinks)
    torch.testing.assert_close(capped(query, key, value, scale=SCALE, **options[mask]).transpose(1, 2), gemma)
    torch.testing.assert_close(sunk(query, key, value, scale=SCALE, **options[mask]).transpose(1, 2), oss)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("has_sinks", [False, True])
@torch.no_grad()
def test_blocks_give_the_same(softcap: float | None, has_sinks: bool):
    query, key, value, sinks = tensors()
    sinks_H = sinks if has_sinks else None
    mask = create_block_mask(lambda row, head, query, key: key <= query, 2, None, LENGTH, LENGTH, device="cpu")
    found = attend_in_blocks(
        flex_attention, query, key, value, block_mask=mask, scale=SCALE, softcap=softcap, sinks_H=sinks_H
    )
    kernel = choose_kernel(softcap=softcap, sinks_H=sinks_H)
    expected = kernel(query, key, value, scale=SCALE, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected)


def test_without_either_the_kernel_is_torchs_own():
    assert choose_kernel(softcap=None, sinks_H=None) is FUSED


@pytest.mark.slow
def test_flex_attention_is_compiled_for_more_kinds_than_dynamos_eight_and_never_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve graphs, of four dtypes and three lengths; beyond the most it is an error, not a matrix of all scores."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    attention._flex_attention.cache_clear()
    compiled = attention._flex_attention()

    def attend(dtype: torch.dtype, length: int) -> None:
        query = torch.ones(1, 1, length, 16, dtype=dtype)
        assert torch.equal(compiled(query, query, query), query)

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for length in (1, 64, 256):
            attend(dtype, length)
    monkeypatch.setattr(attention, "MOST_GRAPHS", 1)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    torch._dynamo.reset()
    attention._flex_attention.cache_clear()
    compiled = attention._flex_attention()
    attend(torch.float32, 64)
    with pytest.raises(FailOnRecompileLimitHit):
        attend(torch.float64, 64)
    attention._flex_attention.cache_clear()
