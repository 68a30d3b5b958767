"""Made-up trajectories for tests of learning: random ids and masks, groups that share prefixes, scored groups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tasks.core.records import Group, Score, TokenSequence, Trajectory
from tasks.learning.shared import batching
from tasks.learning.shared.prefix_trees import tree_of
from tasks.learning.shared.rows import Row


def random_rows(seed: int, count: int) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        length = rng.randint(4, 30)
        mask = [False] + [rng.random() < 0.6 for _ in range(length - 2)] + [True]
        ids = [rng.randrange(2, 300) for _ in range(length)]
        rows.append(Row(ids, mask, [-rng.random() * 5 for _ in ids], rng.choice([-1.0, 0.5, 2.0])))
    return rows


def branching_group(seed: int, count: int) -> list[Row]:
    """Trajectories of one prompt that branch off each other anywhere; some are equal, some a prefix of another."""
    rng = random.Random(seed)
    prompt_length = rng.randint(1, 8)
    rows = [_extend(rng, [rng.randrange(2, 300) for _ in range(prompt_length)], [False] * prompt_length)]
    while len(rows) < count:
        source = rng.choice(rows)
        cut = rng.randint(prompt_length, len(source.token_ids))
        rows.append(_extend(rng, source.token_ids[:cut], source.sampled_mask[:cut]))
    return rows


def _extend(rng: random.Random, ids: list[int], mask: list[bool]) -> Row:
    added = rng.randint(0, 12)
    ids = ids + [rng.randrange(2, 300) for _ in range(added)]
    mask = mask + [rng.random() < 0.6 for _ in range(added)]
    if not any(mask):
        ids, mask = [*ids, 5], [*mask, True]
    return Row(ids, mask, [-rng.random() * 5 for _ in ids], rng.choice([-1.0, 0.5, 2.0]))


def a_group(number: int, rewards: list[float], outcomes: list[str] | None = None, *, round_number: int = 0) -> Group:
    """A scored group of random trajectories; `outcomes` are "success" unless given."""
    rows = random_rows(number, len(rewards))
    trajectories = [
        Trajectory(
            problem_id=f"p{number}", category="c", request="", draw=1, sample_index=i, policy_version=0,
            environment_fingerprint="",
            sequences=[TokenSequence(row.token_ids, row.sampled_mask, row.sampler_logp)], turns=[],
            outcome=(outcomes or ["success"] * 9)[i],  # type: ignore[arg-type]
            limit=None, checks={}, num_calls=0, num_invalid_calls=0,
        )
        for i, row in enumerate(rows)
    ]  # fmt: skip
    scores = [Score(reward, {"outcome": reward}) for reward in rewards]
    return Group(f"p{number}", "c", trajectories, scores, round_number)


def in_sequences(whole: Trajectory, numbers: Sequence[int]) -> Trajectory:
    """The same episode, each turn of which is in the sequence that `numbers` says: there all before it is given."""
    (tokens,) = whole.sequences
    edges = np.flatnonzero(np.diff(np.asarray([False, *tokens.sampled_mask, False], dtype=np.int8)))
    turns = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    found = []
    for number in sorted({*numbers[: len(turns)]}):
        own = [turn for turn, chosen in zip(turns, numbers, strict=False) if chosen == number]
        end = own[-1][1]
        mask = [any(start <= place < stop for start, stop in own) for place in range(end)]
        found.append(TokenSequence(tokens.token_ids[:end], mask, tokens.sampler_logp[:end]))
    return replace(whole, sequences=found)


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def subtree_end(groups: Sequence[Sequence[Row]]) -> np.ndarray:
    """Where the subtree of each position ends, in the one row that the groups are packed into: the largest is first."""
    trees = [tree_of(group) for group in groups]
    return batching._subtree_end(sorted(trees, key=lambda tree: tree.size, reverse=True))


def after(start: Sequence[int], rows: Sequence[Row]) -> list[Row]:
    """The rows behind the same given tokens, such as an agent's rules and tools."""
    num = len(start)
    return [
        replace(
            row,
            token_ids=[*start, *row.token_ids],
            sampled_mask=[False] * num + row.sampled_mask,
            sampler_logp=[0.0] * num + row.sampler_logp,
        )
        for row in rows
    ]
