"""Problems divided into train, select and test: by what a solution hinges on, and by row only to repeat a publication.

`groups`: problems that share a split group lie on one side, or test would measure what train gave away. Each category
gets its share of every side as far as its groups allow. `published`: the two halves that published results rest on,
whatever they share, the held-out one divided by group into select and test; what they share is counted.

The rows of `select` and `test` are in turn over their categories, so that the first n rows are a fair sample too. A
test set wears out with the decisions taken on it; `test_rotation` n takes the next problems of test's own side, after
those of the n sets before. Train and select stay as they are: a reigning champion has learnt from them, and would win a
test set made of them. Left out: what a split group is, which the world or the user says; and rotations that share no
group with those before, since one test set already holds problems of nearly every group of its side.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, Protocol, TypeVar

from pydantic import Field

from tasks.records import Problem
from tasks.settings import Settings

SPLITS = ("train", "select", "test")
HELD_OUT = ("select", "test")
Halves = tuple[frozenset[str], frozenset[str]]  # ids that a publication trained on, and ids that it held out


class HasProblem(Protocol):
    """A row as it is divided: a problem, and whatever else is known of it."""

    @property
    def problem(self) -> Problem: ...


Item = TypeVar("Item")
Row = TypeVar("Row", bound=HasProblem)


class SplitOptions(Settings):
    """How problems are divided. `train_share` is of the split groups, and the rest is halved; `published` has halves of
    its own instead. Rotations are disjoint as long as the other options, and the problems, stay the same.
    """

    split: Literal["groups", "published"]
    split_seed: int = Field(ge=0)
    train_share: float = Field(gt=0, lt=1)
    max_select_problems: int = Field(ge=1)
    max_test_problems: int = Field(ge=1)
    test_rotation: int = Field(ge=0)


def split_and_cap(rows: Sequence[Row], options: SplitOptions, *, halves: Halves | None = None) -> dict[str, list[Row]]:
    """The three splits, select and test cut to size with equal counts a category. `halves` are for `published`."""
    splits = _uncut(rows, options, halves)
    first, last = _rotated(options)
    if options.test_rotation and len(splits["test"]) <= first:
        raise ValueError(
            f"curate.test_rotation = {options.test_rotation} wants the problems from number {first + 1:,} on of those "
            f"on test's side, which has {len(splits['test']):,}; those of train and select are no test for a champion "
            f"that learnt from them. Lower curate.max_test_problems, or bring new problems and begin at 0 again."
        )
    cut = {"select": splits["select"][: options.max_select_problems], "test": splits["test"][first:last]}
    return {**splits, **cut}


def retired_tests(rows: Sequence[Row], options: SplitOptions, *, halves: Halves | None = None) -> list[Row]:
    """The rows of the test sets of the rotations before."""
    return _uncut(rows, options, halves)["test"][: _rotated(options)[0]]


def _rotated(options: SplitOptions) -> tuple[int, int]:
    """Which rows of test's side are the test set."""
    first = options.test_rotation * options.max_test_problems
    return first, first + options.max_test_problems


def _uncut(rows: Sequence[Row], options: SplitOptions, halves: Halves | None) -> dict[str, list[Row]]:
    """The three sides, the rows of select and test in turn over their categories."""
    splits = _by_group(rows, options) if halves is None else _by_halves(rows, halves, seed=options.split_seed)
    for name in HELD_OUT:
        random.Random(f"{options.split_seed}/{name}").shuffle(splits[name])  # else the first groups would fill the cap
        splits[name] = list(in_turn(splits[name], category=lambda row: row.problem.category))
    return splits


def _by_group(rows: Sequence[Row], options: SplitOptions) -> dict[str, list[Row]]:
    side = split_groups(_categories(rows), train_share=options.train_share, seed=options.split_seed)
    return {name: [row for row in rows if side[row.problem.split_group] == name] for name in SPLITS}


def _by_halves(rows: Sequence[Row], halves: Halves, *, seed: int) -> dict[str, list[Row]]:
    """Train as published; the held-out half by split group, half of the groups of each category to select."""
    train_ids, held_out_ids = halves
    strangers = [row.problem.id for row in rows if row.problem.id not in train_ids | held_out_ids]
    if strangers:
        raise ValueError(
            f"curate.split is published, and problem {strangers[0]!r} ({len(strangers)} in all) is in neither half of "
            f"the publication, so nothing says where it belongs. Curate the published problems alone (for bfcl: "
            f"environment.bfcl.categories [multi_turn_base]), or set curate.split to groups."
        )
    held_out = [row for row in rows if row.problem.id in held_out_ids]
    side = _deal(_categories(held_out), lambda num: dict.fromkeys(HELD_OUT, num / 2), seed=seed)
    return {
        "train": [row for row in rows if row.problem.id in train_ids],
        **{name: [row for row in held_out if side[row.problem.split_group] == name] for name in HELD_OUT},
    }


def _categories(rows: Sequence[Row]) -> dict[str, set[str]]:
    """The categories each split group serves."""
    categories: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        categories[row.problem.split_group].add(row.problem.category)
    return categories


def shared_groups(splits: Mapping[str, Sequence[Row]]) -> dict[str, list[str]]:
    """The split groups that are in several splits, with the splits each is in."""
    sides: dict[str, list[str]] = defaultdict(list)
    for name in SPLITS:
        for group in dict.fromkeys(row.problem.split_group for row in splits[name]):
            sides[group].append(name)
    return {group: names for group, names in sides.items() if len(names) > 1}


def split_groups(categories: Mapping[str, set[str]], *, train_share: float, seed: int) -> dict[str, str]:
    """The side of every split group, given the categories it serves: 10 groups of one category at train_share 0.7 have
    the targets 7, 1.5, 1.5 and come out 7, 2, 1.
    """
    return _deal(categories, lambda num: _targets(num, train_share), seed=seed)


def _deal(
    categories: Mapping[str, set[str]], targets: Callable[[int], dict[str, float]], *, seed: int
) -> dict[str, str]:
    """The side of every split group; `targets` says how many of so many groups each side should get.

    Iterative stratification (Sechidis et al., ECML 2011): category after category, the one with the fewest groups
    first, each of its groups goes to the side that is furthest below its share of that category. A category with fewer
    groups than there are sides cannot be on all of them; it fills up the overall shares, so mostly train.
    """
    order = sorted(categories)
    random.Random(seed).shuffle(order)
    members: dict[str, list[str]] = defaultdict(list)
    for group in order:
        for category in categories[group]:
            members[category].append(group)
    wanted = {category: targets(len(groups)) for category, groups in members.items()}
    overall = targets(len(order))
    side: dict[str, str] = {}

    def deal(groups: Sequence[str], need: Mapping[str, float]) -> None:
        for group in groups:
            if group not in side:
                side[group] = max(overall, key=lambda name: (need[name], overall[name]))
                for ledger in (overall, *(wanted[category] for category in categories[group])):
                    ledger[side[group]] -= 1

    for category in sorted(members, key=lambda category: (len(members[category]), category)):
        if len(members[category]) >= len(overall):
            deal(members[category], wanted[category])
    deal(order, overall)
    return side


def _targets(num_groups: int, train_share: float) -> dict[str, float]:
    """How many groups each side should get; at least one for each where there are enough."""
    held_out = num_groups * (1 - train_share) / 2
    if num_groups >= len(SPLITS):
        held_out = min(max(1.0, held_out), (num_groups - 1) / 2)
    return {"train": num_groups - 2 * held_out, "select": held_out, "test": held_out}


def in_turn(items: Iterable[Item], *, category: Callable[[Item], str]) -> Iterator[Item]:
    """The items, one of each category in turn: a,a,a,b,b,c → a,b,c,a,b,a. Within a category the order stays."""
    by_category: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_category[category(item)].append(item)
    for one_of_each in zip_longest(*(by_category[name] for name in sorted(by_category))):
        yield from (item for item in one_of_each if item is not None)
