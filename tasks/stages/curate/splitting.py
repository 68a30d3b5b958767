"""Divides problems into train, select and test by split group, which the environment or the user defines.

`groups`: a keyed hash of its name puts a group on a side, whatever other groups there are, so every machine and every
night agrees: what a champion learnt from never becomes test (infra/decisions/0026). `published`: the halves that
published results depend on, even where they share groups. Test is divided again into `num_test_sets` test sets, since
each decision wears a test set out. Select and test are in turn over their categories, ordered by a keyed hash of the
ids: the first n rows are a fair sample, and new problems displace old ones only by their share.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, Protocol, TypeVar

from tasks.core.records import Problem
from tasks.core.splits import question_key
from tasks.stages.curate.settings import SplitSettings
from tasks.tools.base import Halves

SPLITS = ("train", "select", "test")
HELD_OUT = ("select", "test")
Purpose = Literal["train", "held out", "test set", "order"]


class HasProblem(Protocol):
    @property
    def problem(self) -> Problem: ...


Item = TypeVar("Item")
Row = TypeVar("Row", bound=HasProblem)
Splits = Mapping[str, Sequence[Row]]  # by name


def keyed_hash(seed: int, purpose: Purpose, name: str) -> float:
    """A number in [0, 1) that depends on these three alone; numbers of different purposes are independent."""
    digest = hashlib.blake2b(name.encode(), key=str(seed).encode(), person=purpose.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: more would round up to 1.0


def side_of(group: str, *, seed: int, train_share: float) -> str:
    return "train" if keyed_hash(seed, "train", group) < train_share else held_out_side(group, seed=seed)


def held_out_side(group: str, *, seed: int) -> str:
    """Select or test, by a separate hash: a larger train share moves no group between the two."""
    return "select" if keyed_hash(seed, "held out", group) < 0.5 else "test"


def which_test_set(group: str, options: SplitSettings) -> int:
    return int(keyed_hash(options.split_seed, "test set", group) * options.num_test_sets)


def split_and_cap(rows: Sequence[Row], options: SplitSettings, *, halves: Halves | None = None) -> dict[str, list[Row]]:
    """The splits; select and test are cut to size with equal counts per category. `halves` are for `published`."""
    splits = _uncut(rows, options, halves)
    return {
        "train": splits["train"],
        "select": _ordered(splits["select"], options)[: options.max_select_problems],
        "test": _ordered(splits["test"], options)[: options.max_test_problems],
    }


def keep_on_one_side(
    rows: Sequence[Row], options: SplitSettings, *, halves: Halves | None = None
) -> tuple[list[Row], list[Row]]:
    """(the rows to split, those that ask what an earlier side asks in the same world, under another split group).

    The order is train, select, then each test set, whatever the order of the rows: a new copy never takes a question
    from train to test. A published train half is compared with nothing, since it is used as it is.
    """
    earlier: set[str] = set()
    asked_before: list[Row] = []
    for side in _sides_in_order(rows, options, halves):
        asked = [(row, question_key(row.problem)) for row in side]
        asked_before += [row for row, key in asked if key in earlier]
        earlier |= {key for _, key in asked}
    left_out = set(map(id, asked_before))
    return [row for row in rows if id(row) not in left_out], asked_before


def _sides_in_order(rows: Sequence[Row], options: SplitSettings, halves: Halves | None) -> list[list[Row]]:
    """The sides that must share no question."""
    sides = divide(rows, options, halves)
    tests: list[list[Row]] = [[] for _ in range(options.num_test_sets)]
    for row in sides["test"]:
        tests[which_test_set(row.problem.split_group, options)].append(row)
    return [*([sides["train"]] if halves is None else []), sides["select"], *tests]


def missing_categories(
    rows: Sequence[Row], options: SplitSettings, *, halves: Halves | None = None
) -> dict[str, list[str]]:
    """The categories without a split group in a split, by split; what the caps cut does not count."""
    splits = _uncut(rows, options, halves)
    there = {name: {row.problem.category for row in splits[name]} for name in SPLITS}
    categories = sorted({row.problem.category for row in rows})
    missing = {name: [category for category in categories if category not in there[name]] for name in SPLITS}
    return {name: names for name, names in missing.items() if names}


def other_test_sets(
    rows: Sequence[Row], options: SplitSettings, *, halves: Halves | None = None
) -> tuple[list[Row], list[Row]]:
    """The rows of the test sets before `test_rotation`, and of those after it."""
    test = [(which_test_set(row.problem.split_group, options), row) for row in divide(rows, options, halves)["test"]]
    before = [row for number, row in test if number < options.test_rotation]
    return before, [row for number, row in test if number > options.test_rotation]


def _uncut(rows: Sequence[Row], options: SplitSettings, halves: Halves | None) -> dict[str, list[Row]]:
    sides = divide(rows, options, halves)
    test = [row for row in sides["test"] if which_test_set(row.problem.split_group, options) == options.test_rotation]
    return {**sides, "test": test}


def divide(rows: Sequence[Row], options: SplitSettings, halves: Halves | None) -> dict[str, list[Row]]:
    """The sides by name: before any cap, and test with all of its test sets."""
    seed, share = options.split_seed, options.train_share
    if halves is not None:
        return _by_halves(rows, halves, seed=seed)
    sides = [side_of(row.problem.split_group, seed=seed, train_share=share) for row in rows]
    return {name: [row for row, side in zip(rows, sides, strict=True) if side == name] for name in SPLITS}


def _by_halves(rows: Sequence[Row], halves: Halves, *, seed: int) -> dict[str, list[Row]]:
    """Train as published; the held-out half by split group, about half of the groups to select."""
    train_ids, held_out_ids = halves
    twice = sorted(train_ids & held_out_ids)
    if twice:
        raise ValueError(
            f"curate.split is published, and the publication has problem {twice[0]!r} ({len(twice)} in all) in both of "
            f"its halves, so test would contain training problems. Correct the halves (`published_halves` of the "
            f"environment), or set curate.split to groups."
        )
    strangers = [row.problem.id for row in rows if row.problem.id not in train_ids | held_out_ids]
    if strangers:
        raise ValueError(
            f"curate.split is published, and problem {strangers[0]!r} ({len(strangers)} in all) is in neither half of "
            f"the publication, so its split is unknown. Curate the published problems alone (for bfcl: "
            f"environment.settings.categories [multi_turn_base]), or set curate.split to groups."
        )
    held_out = [row for row in rows if row.problem.id in held_out_ids]
    return {
        "train": [row for row in rows if row.problem.id in train_ids],
        **{
            name: [row for row in held_out if held_out_side(row.problem.split_group, seed=seed) == name]
            for name in HELD_OUT
        },
    }


def _ordered(rows: Sequence[Row], options: SplitSettings) -> list[Row]:
    by_hash = sorted(rows, key=lambda row: (keyed_hash(options.split_seed, "order", row.problem.id), row.problem.id))
    return list(in_turn(by_hash, category=lambda row: row.problem.category))


def shared_groups(splits: Splits[Row]) -> dict[str, list[str]]:
    sides: dict[str, list[str]] = defaultdict(list)
    for name in SPLITS:
        for group in dict.fromkeys(row.problem.split_group for row in splits[name]):
            sides[group].append(name)
    return {group: names for group, names in sides.items() if len(names) > 1}


def in_turn(items: Iterable[Item], *, category: Callable[[Item], str]) -> Iterator[Item]:
    """The items, one of each category in turn: a,a,a,b,b,c → a,b,c,a,b,a. Within a category the order stays."""
    by_category: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_category[category(item)].append(item)
    for one_of_each in zip_longest(*(by_category[name] for name in sorted(by_category))):
        yield from (item for item in one_of_each if item is not None)
