"""How a step of generation attends where scores must stay in float32: the ways of a GPU and of 16 bits, on a CPU."""

from __future__ import annotations

import pytest
import torch

from tasks.models.attention import StepPlan, _fold_heads

ROWS, KEYS, GROUP, LENGTH, SIZE = 3, 2, 3, 40, 16


def a_cache(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    key, value = (torch.randn(ROWS, KEYS, LENGTH, SIZE, generator=generator) for _ in range(2))
    return key.to(dtype), value.to(dtype)


def test_heads_in_the_batch_attend_as_grouped_heads_do() -> None:
    key, value = a_cache(torch.float32)
    query = torch.randn(ROWS, KEYS * GROUP, 5, SIZE, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(ROWS, 1, 5, LENGTH).masked_fill_(torch.arange(LENGTH) > 20, float("-inf"))
    mask[1, 0, :, 9:] = float("-inf")
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(_fold_heads(query, key, value, mask, 0.3), expected)


def test_in_sixteen_bits_the_scores_of_a_step_are_not_rounded() -> None:
    """Large scores: rounded to 8 bits each, they would move an output by some percent; inputs alone by far less."""
    key, value = a_cache(torch.bfloat16)
    query = (12 * torch.randn(1, KEYS * GROUP, ROWS, SIZE, generator=torch.Generator().manual_seed(1))).bfloat16()
    outputs = []
    for dtype in (torch.bfloat16, torch.float32):
        plan = StepPlan(
            torch.arange(LENGTH), place_N=torch.tensor([9, 20, 39]), place_AW=None, append_A=None, dtype=dtype
        )
        outputs.append(plan.attend(query.to(dtype), key.to(dtype), value.to(dtype), 0.25).float())
    assert (outputs[0] - outputs[1]).abs().max() == pytest.approx(0.0, abs=0.02)
