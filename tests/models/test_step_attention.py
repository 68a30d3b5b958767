"""How generation attends where scores must stay in float32 or unwritten: the ways of a GPU and of 16 bits, on a CPU."""

from __future__ import annotations

import pytest
import torch

from tasks.models import attention
from tasks.models.attention import PromptPlan, StepPlan, _fold_heads, grouped_attention

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


class OfTheGPU(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU; the kernel gets plain ones."""

    is_cuda = True


@pytest.mark.parametrize(
    ("dtype", "has_mask", "num_keys"),
    [(torch.float32, False, KEYS * GROUP), (torch.bfloat16, True, KEYS * GROUP), (torch.bfloat16, False, KEYS)],
)
def test_on_a_gpu_no_kernel_is_asked_for_what_it_would_do_by_writing_all_scores(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_mask: bool, num_keys: int
) -> None:
    """Flash takes grouped heads, in 16 bits without a mask; the memory-efficient kernel takes the rest, ungrouped."""
    key, value = a_cache(dtype)
    query = torch.randn(ROWS, KEYS * GROUP, LENGTH, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None] if has_mask else None
    calls = []

    def fused(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append((tensors[1].shape[1], options["enable_gqa"]))
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    monkeypatch.setattr(attention, "FUSED", fused)
    monkeypatch.setattr(attention, "choose_kernel", lambda **_: fused)
    module, on_gpu = torch.nn.Identity(), query.as_subclass(OfTheGPU)
    if mask is None:
        outputs = [grouped_attention(module, on_gpu, key, value, None, plan=plan)[0] for plan in (None, PromptPlan())]
    else:
        outputs = [grouped_attention(module, on_gpu, key, value, mask)[0]]
    assert calls == [(num_keys, num_keys == KEYS)] * len(outputs)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    for output in outputs:
        torch.testing.assert_close(output.as_subclass(torch.Tensor), expected.transpose(1, 2))
