"""Problems divided into train, select and test: by what a solution hinges on, never by row.

Problems that share a split group lie on one side, or test would measure what train gave away. Each category gets its
share of every side as far as its groups allow. The rows of `select` and `test` are in turn over their categories, so
that the first n rows are a fair sample too. Left out: what a split group is, which the world or the user says.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol, TypeVar

from pydantic import Field

from tasks.records import Problem
from tasks.settings import Settings

SPLITS = ("train", "select", "test")
ENOUGH_GROUPS = 3  # from which on a category is promised a group in every split


class HasProblem(Protocol):
    """A row as it is divided: a problem, and whatever else is known of it."""

    @property
    def problem(self) -> Problem: ...


Item = TypeVar("Item")
Row = TypeVar("Row", bound=HasProblem)


class SplitOptions(Settings):
    """How problems are divided. `train_share` is of the split groups; the rest is halved."""

    split_seed: int = Field(ge=0)
    train_share: float = Field(gt=0, lt=1)
    max_select_problems: int = Field(ge=1)
    max_test_problems: int = Field(ge=1)


def split_and_cap(rows: Sequence[Row], options: SplitOptions) -> dict[str, list[Row]]:
    """The three splits: groups dealt to sides, then select and test cut to size with equal counts a category."""
    categories: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        categories[row.problem.split_group].add(row.problem.category)
    side = split_groups(categories, train_share=options.train_share, seed=options.split_seed)
    splits = {name: [row for row in rows if side[row.problem.split_group] == name] for name in SPLITS}
    for name, limit in (("select", options.max_select_problems), ("test", options.max_test_problems)):
        random.Random(f"{options.split_seed}/{name}").shuffle(splits[name])  # else the first groups would fill the cap
        splits[name] = list(in_turn(splits[name], category=lambda row: row.problem.category))[:limit]
    return splits


def split_groups(categories: Mapping[str, set[str]], *, train_share: float, seed: int) -> dict[str, str]:
    """The side of every split group, given the categories it serves.

    Iterative stratification (Sechidis et al., ECML 2011): category after category, the one with the fewest groups
    first, each of its groups goes to the side that is furthest below its share of that category. From three groups on,
    select and test are due at least one. A category with fewer cannot be on every side; it fills up the overall shares,
    so mostly train. Example: 10 groups of one category at train_share 0.7 → targets 7, 1.5, 1.5 → sides 7, 2, 1.
    """
    order = sorted(categories)
    random.Random(seed).shuffle(order)
    members: dict[str, list[str]] = defaultdict(list)
    for group in order:
        for category in categories[group]:
            members[category].append(group)
    wanted = {category: _targets(len(groups), train_share) for category, groups in members.items()}
    overall = _targets(len(order), train_share)
    side: dict[str, str] = {}

    def deal(groups: Sequence[str], need: Mapping[str, float]) -> None:
        for group in groups:
            if group not in side:
                side[group] = max(SPLITS, key=lambda name: (need[name], overall[name]))
                for ledger in (overall, *(wanted[category] for category in categories[group])):
                    ledger[side[group]] -= 1

    for category in sorted(members, key=lambda category: (len(members[category]), category)):
        if len(members[category]) >= ENOUGH_GROUPS:
            deal(members[category], wanted[category])
    deal(order, overall)
    return side


def _targets(num_groups: int, train_share: float) -> dict[str, float]:
    """How many groups each side should get; at least one for each where there are enough."""
    held_out = num_groups * (1 - train_share) / 2
    if num_groups >= ENOUGH_GROUPS:
        held_out = min(max(1.0, held_out), (num_groups - 1) / 2)
    return {"train": num_groups - 2 * held_out, "select": held_out, "test": held_out}


def in_turn(items: Iterable[Item], *, category: Callable[[Item], str]) -> Iterator[Item]:
    """The items, one of each category in turn: a,a,a,b,b,c → a,b,c,a,b,a. Within a category the order stays."""
    by_category: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_category[category(item)].append(item)
    for one_of_each in zip_longest(*(by_category[name] for name in sorted(by_category))):
        yield from (item for item in one_of_each if item is not None)
