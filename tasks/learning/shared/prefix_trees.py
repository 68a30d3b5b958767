"""Sequences as trees of their common prefixes: a group's, and of groups whose prompts begin alike.

Nodes are in depth-first order. All prompts of an agent may begin with the same rules and tools, thousands of tokens, so
the problems of a step share those positions too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasks.learning.shared.rows import Row
from tasks.models.attention import Branch

MIN_SHARED = 64  # tokens with which prompts begin alike: fewer are not worth a deeper tree


@dataclass(frozen=True, slots=True)
class Tree:
    ids: np.ndarray
    position: np.ndarray
    subtree_end: np.ndarray
    branches: list[Branch]
    predictor: np.ndarray
    target: np.ndarray
    sampler_logp: np.ndarray
    advantage: np.ndarray
    sequence: np.ndarray
    episode_length: np.ndarray
    is_first: np.ndarray

    @property
    def size(self) -> int:
        return len(self.ids)


def trees_of(groups: Sequence[Sequence[Row]], max_tokens: int, *, num_ranks: int, num_lanes: int) -> list[Tree]:
    """Each group as one tree, or as several where it is larger than `max_tokens`; groups that begin alike share one, as
    far as every lane of every rank has a part of them.
    """
    alone = [Alone(group, tree_of(group)) for group in groups]
    trees: list[Tree] = []
    for joined in _joined(alone, max_tokens, num_ranks=num_ranks, num_lanes=num_lanes):
        rows = [row for member in joined for row in member.group]
        trees += _trees_that_fit(rows, joined[0].tree if len(joined) == 1 else tree_of(rows), max_tokens)
    return trees


class Alone(NamedTuple):
    """A group, and its tree without any other's."""

    group: Sequence[Row]
    tree: Tree

    @property
    def start(self) -> list[int]:
        return self.group[0].token_ids


def _joined(groups: list[Alone], max_tokens: int, *, num_ranks: int, num_lanes: int) -> list[list[Alone]]:
    alike: dict[Hashable, list[Alone]] = {}
    for number, group in enumerate(groups):
        start = tuple(group.start[:MIN_SHARED])
        alike.setdefault(start if len(start) == MIN_SHARED else number, []).append(group)
    if 2 * num_lanes * max((group.tree.size for group in groups), default=0) > max_tokens:
        num_lanes = 1  # a tree of a lane would have room for hardly more than one group
    num_parts = num_ranks * num_lanes
    return [
        joined
        for found in alike.values()
        for joined in _join(found, max_tokens // num_lanes, most=-(-len(found) // num_parts))
    ]


def _join(groups: list[Alone], max_tokens: int, *, most: int) -> list[list[Alone]]:
    """Neighbours in sorted order, which have most in common, as long as their tree fits, and no more than `most`."""
    joined: list[list[Alone]] = []
    size = 0
    previous = np.empty(0, dtype=np.int64)
    for group in sorted(groups, key=lambda group: group.start):
        start, own = np.asarray(group.start, dtype=np.int64), group.tree.size
        added = own - min(own, common_prefix(previous, start))
        if joined and size + added <= max_tokens and len(joined[-1]) < most:
            joined[-1].append(group)
            size += added
        else:
            joined.append([group])
            size = own
        previous = start
    return joined


def _trees_that_fit(group: Sequence[Row], tree: Tree, max_tokens: int) -> list[Tree]:
    """The group, whose one tree is `tree`, or several that fit; neighbours in sorted order stay together."""
    if tree.size <= max_tokens or len(group) == 1:
        return [tree]
    ordered = sorted(group, key=_inputs)
    middle = len(ordered) // 2
    halves = ordered[:middle], ordered[middle:]
    return [tree for half in halves for tree in _trees_that_fit(half, tree_of(half), max_tokens)]


def tree_of(rows: Sequence[Row]) -> Tree:
    """In sorted order, a row's longest common prefix with any earlier row is that with the row just before it."""
    ordered = sorted(rows, key=_inputs)
    ids, position, predictor, target, sampler_logp, count = [], [], [], [], [], []
    branches: list[Branch] = []
    size = 0
    path = previous = np.empty(0, dtype=np.int64)
    closed: list[tuple[np.ndarray, int]] = []
    for row in ordered:
        tokens, sampled = np.asarray(row.token_ids, dtype=np.int64), np.flatnonzero(row.sampled_mask)
        assert sampled[0] > 0, "nothing precedes the first token, so it cannot have been sampled"
        inputs = tokens[: sampled[-1]]
        common = common_prefix(previous, inputs)
        closed.append((path[common:], size))
        added = len(inputs) - common
        path = np.concatenate([path[:common], np.arange(size, size + added)])
        if added:
            branches.append(Branch(size, added, path))
        ids.append(inputs[common:])
        position.append(np.arange(common, len(inputs)))
        predictor.append(path[sampled - 1])
        target.append(tokens[sampled])
        sampler_logp.append(np.asarray(row.sampler_logp, dtype=np.float32)[sampled])
        count.append(len(sampled))
        size, previous = size + added, inputs
    closed.append((path, size))
    subtree_end = np.empty(size, dtype=np.int64)
    for nodes, end in closed:
        subtree_end[nodes] = end
    return Tree(
        ids=np.concatenate(ids),
        position=np.concatenate(position),
        subtree_end=subtree_end,
        branches=branches,
        predictor=np.concatenate(predictor),
        target=np.concatenate(target),
        sampler_logp=np.concatenate(sampler_logp),
        advantage=np.concatenate(
            [_per_token(row.advantage, num_tokens) for row, num_tokens in zip(ordered, count, strict=True)]
        ),
        sequence=np.repeat(np.arange(len(ordered)), count),
        episode_length=np.asarray([num + row.num_beside for row, num in zip(ordered, count, strict=True)]),
        is_first=np.asarray([row.is_first for row in ordered]),
    )


def _per_token(advantage: float | list[float], num_tokens: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(advantage, dtype=np.float32), (num_tokens,))


def _inputs(row: Row) -> list[int]:
    last = len(row.sampled_mask) - 1 - row.sampled_mask[::-1].index(True)
    return row.token_ids[:last]


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens at the start are equal."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter
