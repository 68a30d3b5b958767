"""Splitting: what shares a split group stays together, shares hold a category, and a cut leaves a fair sample."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.checkup.case import Case
from tasks.checkup.data import splits as doctor_splits
from tasks.checkup.findings import Finding
from tasks.environments.bfcl_problems import chosen_problems, published_halves
from tasks.environments.options import BFCLSettings
from tasks.records import Problem
from tasks.settings import Paths
from tasks.splitting import SplitOptions, in_turn, retired_tests, shared_groups, split_and_cap, split_groups

FIRST_OF_BASE = BFCLSettings(categories=["multi_turn_base"], turns="first")


@dataclass(frozen=True, slots=True)
class Row:
    """What is divided: a problem and its place."""

    position: int
    problem: Problem


def row(index: int, *, category: str = "easy", group: str = "g", id: str = "") -> Row:
    problem = {
        "id": id or str(index),
        "category": category,
        "level": 1,
        "requests": ["Make 3."],
        "world": {"target": 3, "marker": index},
        "reference": [{"calls": [{"name": "add", "arguments": {"amount": 3}}], "answer": "3"}],
        "split_group": group,
    }
    return Row(index, Problem.model_validate(problem))


def options(**changed: Any) -> SplitOptions:
    values = {
        "split": "groups",
        "split_seed": 0,
        "train_share": 0.5,
        "max_select_problems": 10,
        "max_test_problems": 10,
        "test_rotation": 0,
    }
    return SplitOptions.model_validate({**values, "max_test_problems": 10, **changed})


def test_ten_groups_of_one_category_at_seven_tenths_are_split_seven_two_one() -> None:
    side = split_groups({f"g{i}": {"easy"} for i in range(10)}, train_share=0.7, seed=0)
    assert Counter(side.values()) == {"train": 7, "select": 2, "test": 1}


def test_a_category_of_three_groups_among_a_hundred_has_one_on_every_side() -> None:
    categories = {f"g{i}": {"easy"} for i in range(97)} | {f"r{i}": {"rare", "easy"} for i in range(3)}
    side = split_groups(categories, train_share=0.7, seed=0)
    assert sorted(side[f"r{i}"] for i in range(3)) == ["select", "test", "train"]
    assert Counter(side.values())["train"] == 70


def test_categories_of_one_group_each_fill_the_overall_shares_so_no_split_is_empty() -> None:
    side = split_groups({f"g{i}": {f"c{i}"} for i in range(200)}, train_share=0.7, seed=0)
    assert Counter(side.values()) == {"train": 140, "select": 30, "test": 30}


def test_a_lone_group_of_a_rare_category_goes_to_train() -> None:
    for seed in range(5):
        side = split_groups({f"g{i}": {"easy"} for i in range(40)} | {"x": {"rare"}}, train_share=0.7, seed=seed)
        assert side["x"] == "train"


def test_another_seed_splits_otherwise_and_the_same_seed_the_same() -> None:
    categories = {f"g{i}": {"easy"} for i in range(30)}
    assert split_groups(categories, train_share=0.7, seed=1) == split_groups(categories, train_share=0.7, seed=1)
    assert split_groups(categories, train_share=0.7, seed=1) != split_groups(categories, train_share=0.7, seed=2)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    groups=st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=40, max_size=80),
    share=st.floats(0.4, 0.8),
    seed=st.integers(0, 5),
)
def test_whatever_categories_groups_serve_the_shares_hold_and_common_categories_are_everywhere(
    groups: list[set[str]], share: float, seed: int
) -> None:
    categories = {f"g{i}": served for i, served in enumerate(groups)}
    side = split_groups(categories, train_share=share, seed=seed)
    assert side.keys() == categories.keys()
    assert abs(Counter(side.values())["train"] / len(groups) - share) < 0.15
    served_on = defaultdict(set)
    for group, served in categories.items():
        for category in served:
            served_on[category].add(side[group])
    for category, sides in served_on.items():
        if sum(category in served for served in groups) >= 12:
            assert sides == {"train", "select", "test"}


def test_problems_that_share_a_group_are_on_one_side_and_each_is_used_at_most_once() -> None:
    rows = [row(i, category="ab"[i % 2], group=f"g{i % 20}") for i in range(200)]
    splits = split_and_cap(rows, options(max_select_problems=500, max_test_problems=500))
    sides = defaultdict(set)
    for name, members in splits.items():
        for member in members:
            sides[member.problem.split_group].add(name)
    assert {len(names) for names in sides.values()} == {1}
    assert sorted(member.position for members in splits.values() for member in members) == list(range(200))


def test_a_cap_takes_equal_counts_of_each_category_and_gives_away_what_a_short_one_lacks() -> None:
    # 40 groups of each of a and b, 3 of c: at train_share 0.5 test has 10 of a, 10 of b, 1 of c.
    categories = ["a"] * 40 + ["b"] * 40 + ["c"] * 3
    rows = [row(i, category=category, group=f"g{i}") for i, category in enumerate(categories)]
    splits = split_and_cap(rows, options(max_test_problems=9, max_select_problems=6))
    assert Counter(member.problem.category for member in splits["test"]) == {"a": 4, "b": 4, "c": 1}
    assert "".join(member.problem.category for member in splits["test"]) == "abcababab"
    assert len(splits["select"]) == 6


def test_a_rotation_takes_the_next_problems_of_tests_own_side_in_equal_counts_a_category() -> None:
    """Test's side has 25 problems of a and 25 of b: rotations 0 to 4 of ten, and nothing after them."""
    rows = [row(i, category="ab"[i % 2], group=f"g{i}") for i in range(200)]
    rotations = [split_and_cap(rows, options(test_rotation=n)) for n in range(5)]
    tests = [[member.position for member in splits["test"]] for splits in rotations]
    assert len({position for test in tests for position in test}) == 50
    assert all(Counter(m.problem.category for m in splits["test"]) == {"a": 5, "b": 5} for splits in rotations)
    assert all(splits["train"] == rotations[0]["train"] for splits in rotations)
    assert all(splits["select"] == rotations[0]["select"] for splits in rotations)
    retired = [member.position for member in retired_tests(rows, options(test_rotation=2))]
    assert retired == tests[0] + tests[1]
    assert retired_tests(rows, options()) == []
    with pytest.raises(ValueError, match=r"test_rotation = 5 wants the problems from number 51 on .* has 50;"):
        split_and_cap(rows, options(test_rotation=5))


def test_the_last_rotation_holds_what_is_left() -> None:
    rows = [row(i, category="ab"[i % 2], group=f"g{i}") for i in range(200)]
    assert len(split_and_cap(rows, options(max_test_problems=40, test_rotation=1))["test"]) == 10


def test_items_come_one_of_each_category_in_turn() -> None:
    assert "".join(in_turn("aaabbc", category=str)) == "abcaba"
    assert list(in_turn(["b2", "a1", "b1"], category=lambda item: item[0])) == ["a1", "b2", "b1"]
    assert list(in_turn([], category=str)) == []


# ---- published halves


def test_published_halves_are_kept_and_the_held_out_one_is_divided_by_group() -> None:
    # 8 trained on, 8 held out in 4 groups of two; group g0 is on both sides, as it was published.
    rows = [row(i, id=f"t{i}", group=f"g{i}") for i in range(8)]
    rows += [row(8 + i, id=f"h{i}", group=f"g{100 * (i // 2)}") for i in range(8)]
    halves = frozenset(f"t{i}" for i in range(8)), frozenset(f"h{i}" for i in range(8))
    splits = split_and_cap(rows, options(split="published"), halves=halves)
    assert [item.problem.id for item in splits["train"]] == [f"t{i}" for i in range(8)]
    assert [len(splits[name]) for name in ("select", "test")] == [4, 4]
    assert shared_groups({**splits, "train": []}) == {}
    (shared,) = shared_groups(splits).items()
    assert shared[0] == "g0" and shared[1][0] == "train"


def test_the_held_out_half_is_divided_the_same_way_each_time_and_otherwise_with_another_seed() -> None:
    rows = [row(i, id=f"h{i}", group=f"g{i}", category="ab"[i % 2]) for i in range(40)]
    halves = frozenset[str](), frozenset(item.problem.id for item in rows)

    def select(seed: int) -> list[str]:
        splits = split_and_cap(rows, options(split="published", split_seed=seed, max_select_problems=99), halves=halves)
        assert Counter(item.problem.category for item in splits["select"]) == {"a": 10, "b": 10}
        return sorted(item.problem.id for item in splits["select"])

    assert select(0) == select(0) != select(1)


def test_a_problem_in_neither_half_is_refused_with_what_to_do() -> None:
    rows = [row(0, id="t"), row(1, id="h"), row(2, id="stranger")]
    with pytest.raises(ValueError, match=r"'stranger' \(1 in all\) is in neither half .* set curate\.split to groups"):
        split_and_cap(rows, options(split="published"), halves=(frozenset("t"), frozenset("h")))


def test_a_shared_group_is_named_with_its_splits() -> None:
    splits = {
        "train": [row(0, group="x"), row(1, group="x")],
        "select": [row(2, group="y")],
        "test": [row(3, group="x")],
    }
    assert shared_groups(splits) == {"x": ["train", "test"]}


@pytest.mark.slow
def test_the_published_halves_of_bfcl_are_those_of_the_ids_sorted_as_text_and_share_11_ground_truths() -> None:
    # In file order, scikit-learn's halves with the same seed would share 12.
    rows = [Row(number, problem) for number, problem in enumerate(chosen_problems(FIRST_OF_BASE))]
    train, held_out = halves = published_halves()
    assert len(train) == len(held_out) == 100 and not train & held_out
    wide = options(split="published", max_select_problems=100, max_test_problems=100)
    splits = split_and_cap(rows, wide, halves=halves)
    assert {item.problem.id for item in splits["train"]} == train
    assert sum(len(splits[name]) for name in ("select", "test")) == 100
    shared = shared_groups(splits)
    assert len(shared) == 11 and {names[0] for names in shared.values()} == {"train"}
    assert sum(item.problem.split_group in shared for members in splits.values() for item in members) == 44


@pytest.mark.slow
def test_by_group_the_halves_of_bfcl_share_nothing() -> None:
    rows = [Row(number, problem) for number, problem in enumerate(chosen_problems(FIRST_OF_BASE))]
    splits = split_and_cap(rows, options(max_select_problems=100, max_test_problems=100))
    assert shared_groups(splits) == {}
    assert sum(len(members) for members in splits.values()) == 200
    assert 90 <= len(splits["train"]) <= 110


# ---- what the doctor says of it


def doctor_says(rows: dict[str, list[Problem]], split: str, tmp_path: Path) -> Finding:
    (tmp_path / "curate").mkdir(exist_ok=True)
    (tmp_path / "curate" / "demonstrations.jsonl").write_text("")
    settings = SimpleNamespace(curate=options(split=split))
    return doctor_splits(cast(Case, SimpleNamespace(problems=rows, settings=settings, paths=Paths(tmp_path))))


def test_the_doctor_warns_of_what_published_halves_share_and_fails_what_select_and_test_share(tmp_path: Path) -> None:
    problems = [row(i, group=group).problem for i, group in enumerate("xyx")]
    shared = {"train": problems[:1], "select": problems[1:2], "test": problems[2:]}
    assert doctor_says(shared, "groups", tmp_path).result == "fail"
    found = doctor_says(shared, "published", tmp_path)
    assert found.result == "warn"
    assert found.text == "1 split groups are in train and held out, as published: x (train, test)"
    between = {"train": problems[1:2], "select": problems[:1], "test": problems[2:]}
    assert doctor_says(between, "published", tmp_path).result == "fail"
