"""Trajectories to tensors: each group is a tree that shares common prefixes, and a row packs several trees.

The trajectories of a group share a prompt, and often the first calls and replies. A tree computes every common prefix
once; with prompts of thousands of tokens that is most of the work (`prefix_trees.py`). Nodes are in depth-first order,
so position q sees position k where k ≤ q < subtree_end[k]. On CUDA FlexAttention has a block mask of that; on CPU each
branch (what a trajectory adds to those before it) attends to its own path (`models/attention.TreePlan`). No trajectory
is cut in two.

Shapes: B rows, T positions, M sampled tokens (one per sequence and position), U distinct positions that predict them, S
sequences. The log-prob of a token is read at the position before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tasks.learning.shared.dealing import deal
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.prefix_trees import Tree, tree_of, trees_of
from tasks.learning.shared.ranks import Ranks
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import OptimizerSettings, Packing
from tasks.models.attention import Branch, TreePlan
from tasks.models.tree_blocks import tree_block_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_UNEVEN = 1.25  # of the longer lane's positions to an even share: above it two lanes gain nothing


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Depth of each position of a packed row, and which of the others each sees.

    `plan` is for attention on CPU, `block_mask` on CUDA; the other is None. Every forward of the micro-batch uses it.
    """

    position_BT: Tensor
    plan: TreePlan | None
    block_mask: BlockMask | None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward, and what the loss needs of each sampled token.

    `tree` is None for padded rows of one sequence each; else one row contains packed trees. `predictor_U` indexes [B·T]
    flat; `predictor_M` is the index into it for each token, ascending. `episode_length_S`: the sampled tokens of the
    episode that each sequence is of, all its sequences together. `lane` is the thread that computes it (`lanes.py`).
    """

    ids_BT: Tensor
    tree: TreeLayout | None
    predictor_U: Tensor
    predictor_M: Tensor
    target_M: Tensor
    sampler_logp_M: Tensor
    advantage_M: Tensor
    sequence_M: Tensor
    episode_length_S: Tensor
    lane: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.target_M.numel())


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes of an optimizer step. Every rank has as many micro-batches: where it has less work, the
    last contain no sampled token, since ranks compute each layer together. `episode_lengths` are the sampled tokens
    of each episode of the step, over all ranks.
    """

    batches: list[MicroBatch]
    episode_lengths: list[int]


def micro_batches(
    groups: Sequence[Sequence[Row]], *, packing: Packing, max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """All rows in micro-batches of at most `max_tokens` positions (a single sequence may be longer), longest first.

    The cut changes no gradient: gradients add up, and every denominator covers the whole optimizer step.
    """
    return share_of(groups, packing=packing, max_tokens=max_tokens, device=device, rank=0, num_ranks=1).batches


def share_of(
    groups: Sequence[Sequence[Row]],
    *,
    packing: Packing,
    max_tokens: int,
    device: torch.device,
    rank: int,
    num_ranks: int,
    num_lanes: int = 1,
) -> Share:
    """The micro-batches of one rank: whole trees, dealt by their positions, over its lanes if they share well."""
    is_tree = packing == "tree"
    if is_tree:
        trees = trees_of(groups, max_tokens, num_ranks=num_ranks, num_lanes=num_lanes)
    else:
        trees = [tree_of([row]) for group in groups for row in group]
    dealt = [[trees[item] for item in items] for items in deal([tree.size for tree in trees], num_ranks)]
    lanes = _lanes(dealt[rank], max_tokens, num_lanes)
    if len(lanes) > 1:
        cuts = [_cut(trees, max_tokens // num_lanes, is_padded=not is_tree) for trees in lanes]
        own = [_tensors(batch, device, is_tree=is_tree, lane=lane) for lane, cut in enumerate(cuts) for batch in cut]
        missing = 0
    else:
        cuts = [_cut(share, max_tokens, is_padded=not is_tree) for share in dealt]
        own = [_tensors(batch, device, is_tree=is_tree) for batch in cuts[rank]]
        missing = max(map(len, cuts)) - len(own)
    return Share(
        own + [_without_tokens(device, is_tree=is_tree) for _ in range(missing)],
        [int(length) for tree in trees for length in tree.episode_length[tree.is_first]],
    )


def own_share(
    groups: Sequence[Sequence[Row]], settings: OptimizerSettings, *, device: torch.device, ranks: Ranks, lanes: Lanes
) -> Share:
    """`share_of` this rank."""
    return share_of(
        groups,
        packing=settings.packing,
        max_tokens=settings.micro_batch_tokens,
        device=device,
        rank=ranks.number,
        num_ranks=ranks.size,
        num_lanes=lanes.number,
    )


def _lanes(trees: list[Tree], max_tokens: int, num_lanes: int) -> list[list[Tree]]:
    """The trees dealt to lanes of a rank that is alone. Just one lane where another would wait for it for long, or
    where one tree would be more than its part of what may be computed at once.
    """
    sizes = [tree.size for tree in trees]
    lanes = [[trees[item] for item in items] for items in deal(sizes, num_lanes)]
    longest = max((sum(tree.size for tree in lane) for lane in lanes), default=0)
    is_even = longest * num_lanes <= MAX_UNEVEN * sum(sizes) and max(sizes, default=0) * num_lanes <= max_tokens
    return lanes if num_lanes > 1 and is_even and all(lanes) else [trees]


def _cut(trees: list[Tree], max_tokens: int, *, is_padded: bool) -> list[list[Tree]]:
    batches: list[list[Tree]] = []
    used = max_tokens
    for tree in sorted(trees, key=lambda tree: tree.size, reverse=True):
        cost = batches[-1][0].size if is_padded and batches else tree.size
        if used + cost > max_tokens:
            batches.append([])
            used, cost = 0, tree.size
        batches[-1].append(tree)
        used += cost
    return batches


def _tensors(trees: list[Tree], device: torch.device, *, is_tree: bool, lane: int = 0) -> MicroBatch:
    batch = (_pack if is_tree else _pad)(trees, device)
    return replace(batch, lane=lane) if lane else batch


def _pad(trees: list[Tree], device: torch.device) -> MicroBatch:
    """One sequence per row, padded on the right, where causal attention never looks."""
    width = max(tree.size for tree in trees)
    ids = np.zeros((len(trees), width), np.int64)
    for row, tree in enumerate(trees):
        ids[row, : tree.size] = tree.ids
    starts = [row * width for row in range(len(trees))]
    return _with_entries(trees, starts, device, ids_BT=torch.from_numpy(ids), tree=None)


def _pack(trees: list[Tree], device: torch.device) -> MicroBatch:
    starts = _starts(trees)
    branches = [
        Branch(branch.start + start, branch.num_new, branch.path + start)
        for tree, start in zip(trees, starts, strict=True)
        for branch in tree.branches
    ]
    on_cuda = device.type == "cuda"
    layout = TreeLayout(
        position_BT=torch.from_numpy(np.concatenate([tree.position for tree in trees]))[None].to(device),
        plan=None if on_cuda else TreePlan(branches, device=device),
        block_mask=tree_block_mask(_subtree_end(trees), device=device) if on_cuda else None,
    )
    ids = np.concatenate([tree.ids for tree in trees])[None]
    return _with_entries(trees, starts.tolist(), device, ids_BT=torch.from_numpy(ids), tree=layout)


def _without_tokens(device: torch.device, *, is_tree: bool) -> MicroBatch:
    """One position, and nothing that was sampled: its loss is 0, and its gradient 0 in every weight."""
    tree = tree_of([Row([0, 0], [False, True], [0.0, 0.0], 0.0)])
    batch = _tensors([tree], device, is_tree=is_tree)
    nothing = {item.name: getattr(batch, item.name)[:0] for item in fields(batch) if item.name.endswith(("_M", "_S"))}
    return replace(batch, **nothing)


def _starts(trees: list[Tree]) -> np.ndarray:
    return np.cumsum([0, *(tree.size for tree in trees[:-1])])


def _subtree_end(trees: list[Tree]) -> np.ndarray:
    """Where in the row the subtree of each position ends."""
    return np.concatenate([tree.subtree_end + start for tree, start in zip(trees, _starts(trees), strict=True)])


def _with_entries(
    trees: list[Tree], starts: list[int], device: torch.device, *, ids_BT: Tensor, tree: TreeLayout | None
) -> MicroBatch:
    predictor = np.concatenate([item.predictor + start for item, start in zip(trees, starts, strict=True)])
    first = np.cumsum([0, *(len(item.episode_length) for item in trees[:-1])])
    sequence = np.concatenate([item.sequence + number for item, number in zip(trees, first, strict=True)])
    order = np.argsort(predictor, kind="stable")
    predictor_U, predictor_M = np.unique(predictor[order], return_inverse=True)

    def entries(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(item, name) for item in trees])[order]).to(device)

    return MicroBatch(
        ids_BT=ids_BT.to(device),
        tree=tree,
        predictor_U=torch.from_numpy(predictor_U).to(device),
        predictor_M=torch.from_numpy(predictor_M).to(device),
        target_M=entries("target"),
        sampler_logp_M=entries("sampler_logp"),
        advantage_M=entries("advantage"),
        sequence_M=torch.from_numpy(sequence[order]).to(device),
        episode_length_S=torch.from_numpy(np.concatenate([item.episode_length for item in trees])).to(device),
    )
