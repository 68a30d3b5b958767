"""FlexAttention's block tables, made from the ends of subtrees, equal those that torch makes from a dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tasks.learning.shared.batching import micro_batches
from tasks.learning.shared.rows import Row
from tasks.models.tree_blocks import BLOCK, tree_block_mask
from tests.learning.rows import subtree_end

CPU = torch.device("cpu")
TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices")


@st.composite
def subtree_ends(draw: st.DrawFn) -> np.ndarray:
    """Of a row of trees, in depth-first order, of up to 700 positions."""
    length = draw(st.integers(1, 700))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    end, open_until = np.empty(length, np.int64), [length]
    for position in range(length):
        while open_until[-1] <= position:
            open_until.pop()
        is_chain = generator.random() < 0.97
        end[position] = open_until[-1] if is_chain else generator.integers(position + 1, open_until[-1] + 1)
        open_until.append(int(end[position]))
    return end


def dense(end: np.ndarray) -> BlockMask:
    end_T = torch.from_numpy(end)

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    return create_block_mask(is_visible, 1, None, len(end), len(end), device="cpu", BLOCK_SIZE=BLOCK)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(subtree_ends())
def test_the_tables_are_those_that_torch_makes_from_the_dense_mask(end: np.ndarray) -> None:
    found, expected = tree_block_mask(end, device=CPU), dense(end)
    assert found.seq_lengths == expected.seq_lengths == (len(end), len(end))
    for name in TABLES:
        counted = name.replace("indices", "num_blocks")
        counts = getattr(expected, counted)
        ours, theirs = getattr(found, name), getattr(expected, name)
        if name == counted:
            assert ours.tolist() == theirs.tolist(), name
            continue
        for row, count in enumerate(counts[0, 0].tolist()):  # what follows the set ones is never read
            assert ours[0, 0, row, :count].tolist() == theirs[0, 0, row, :count].tolist(), name


def test_a_row_of_one_chain_of_300_is_full_below_the_diagonal_but_in_its_last_block() -> None:
    """Three blocks; the last has 44 positions, so its row is visible in part."""
    mask = tree_block_mask(np.full(300, 300), device=CPU)
    assert mask.full_kv_num_blocks is not None
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 3]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 0]]]


@pytest.mark.slow
def test_flex_attention_computes_what_the_plan_of_the_branches_does() -> None:
    """A prompt of 150 tokens with three branches, and another tree beside it: 300 positions in three blocks."""
    generator = torch.Generator().manual_seed(0)
    prompt = list(range(1, 151))
    first = [a_row([*prompt, *range(200 + 30 * n, 230 + 30 * n)]) for n in range(3)]
    second = [a_row(list(range(400, 464)))]
    (batch,) = micro_batches([first, second], packing="tree", max_tokens=1000, device=CPU)
    assert batch.tree is not None and batch.tree.plan is not None
    length = batch.ids_BT.shape[1]
    assert length == 150 + 3 * 29 + 63
    query = torch.randn(1, 4, length, 16, generator=generator)
    key, value = (torch.randn(1, 2, length, 16, generator=generator) for _ in range(2))
    mask = tree_block_mask(subtree_end([first, second]), device=CPU)
    with torch.no_grad():
        found = flex_attention(query, key, value, block_mask=mask, scale=0.25, enable_gqa=True)
        expected = batch.tree.plan.attend(query, key, value, 0.25)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)


def a_row(ids: list[int]) -> Row:
    return Row(ids, [False] * (len(ids) - 1) + [True], [0.0] * len(ids), 1.0)
