"""FlexAttention's block tables for packed trees, made in numpy once per micro-batch.

For CUDA, where they have never run; on a CPU they are held to those of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # positions; FlexAttention's own


def tree_block_mask(subtree_end: np.ndarray, *, device: torch.device) -> BlockMask:
    """FlexAttention's tables for a packed row in which position q sees position k where k ≤ q < subtree_end[k].

    Made from the ends of subtrees by block: torch's `create_block_mask` makes the dense [T, T] mask first, twice. A
    block is full where every position in it is visible, so one that ends beyond T never is.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = len(subtree_end)
    is_partial, is_full = _visible_blocks(subtree_end)
    end_T = torch.from_numpy(subtree_end).to(device)

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_T[key])

    tables = [table.to(device) for blocks in (is_partial, is_full) for table in _block_tables(blocks)]
    return BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=BLOCK, mask_mod=is_visible, seq_lengths=(length, length))


def _visible_blocks(subtree_end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks [query, key] are visible in part, and which whole.

    Below the diagonal every key comes before every query, so a block is visible from its first query if its furthest
    subtree reaches that, and whole if its nearest one reaches the end of the queries. On the diagonal each position
    sees itself.
    """
    length = len(subtree_end)
    number = np.arange(-(-length // BLOCK))
    starts = number * BLOCK
    furthest, nearest = np.maximum.reduceat(subtree_end, starts), np.minimum.reduceat(subtree_end, starts)
    is_below, is_whole = number[:, None] > number[None, :], starts + BLOCK <= length
    is_any = is_below & (furthest[None, :] > starts[:, None])
    is_full = is_below & (nearest[None, :] >= starts[:, None] + BLOCK) & is_whole[:, None]
    return (is_any | np.eye(len(number), dtype=bool)) & ~is_full, is_full


def _block_tables(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
    """Per row of blocks how many are set, and the columns, those that are set first; [1, 1, rows] and
    [1, 1, rows, columns].
    """
    counts = blocks.sum(1).astype(np.int32)
    columns = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(columns)[None, None]
