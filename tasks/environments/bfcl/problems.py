"""The package's rows as Problems: one user request or the whole conversation, with the ground truth as reference.

Requests that lack a function (`multi_turn_miss_func`, until a later request shows it) or a parameter
(`multi_turn_miss_param`) have no ground truth and are not judged. A problem with only such a request is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from tasks.core.files import json_hash
from tasks.core.records import Problem, ReferenceTurn
from tasks.environments.bfcl.package import Row, announcement, read_call, read_rows, tools_of_class
from tasks.environments.bfcl.settings import BFCL_CATEGORIES, BFCLCategory, BFCLSettings, Turns

ROWS_PER_CATEGORY = 200  # as published; with fewer it is another benchmark
Keys = tuple[str, str]  # (row number, shared by its variants in other categories; ground truth)


def chosen_problems(settings: BFCLSettings) -> list[Problem]:
    """In the package's order. Problems with one ground truth, or of variants of one row, share a split group, whose
    name does not depend on which categories are chosen.
    """
    groups = split_groups(settings.turns)
    rows = [problem for category in settings.categories for problem in problems(category, settings.turns)]
    return [problem.model_copy(update={"split_group": groups[problem.id]}) for problem in rows]


@cache
def split_groups(turns: Turns) -> dict[str, str]:
    """The split group of each problem by its id, joined over all categories."""
    rows = [problem for category in BFCL_CATEGORIES for problem in problems(category, turns)]
    keys = [(problem.id.rpartition("_")[2], problem.split_group) for problem in rows]
    return {problem.id: group for problem, group in zip(rows, _joined(keys), strict=True)}


@cache
def problems(category: BFCLCategory, turns: Turns) -> tuple[Problem, ...]:
    """The problems of a category that can fail; the split group is the ground truth."""
    made = (_problem(category, row, truth, turns) for row, truth in read_rows(category))
    return tuple(problem for problem in made if any(turn.calls for turn in problem.reference))


def not_judged(settings: BFCLSettings) -> list[str]:
    judged = {problem.id for category in settings.categories for problem in problems(category, settings.turns)}
    ids = [row["id"] for category in settings.categories for row, _ in read_rows(category)]
    return [id for id in ids if id not in judged]


@cache
def published_halves() -> tuple[frozenset[str], frozenset[str]]:
    """(train, held out): the ids of `multi_turn_base` in the published recipe (Bespoke Labs, 2025-04, "Improving
    multi-turn tool use with reinforcement learning", `bfcl_env.py`). It splits the ids sorted as text, so 10 comes
    before 2.
    """
    from sklearn.model_selection import train_test_split

    ids = sorted(row["id"] for row, _ in read_rows("multi_turn_base"))
    train, held_out = train_test_split(ids, test_size=0.5, random_state=42)
    return frozenset(train), frozenset(held_out)


@cache
def conversations(category: BFCLCategory) -> Mapping[str, Problem]:
    return {problem.id: problem for problem in problems(category, "all")}


def _problem(category: BFCLCategory, row: Row, truth: Sequence[Sequence[str]], turns: Turns) -> Problem:
    classes, held_out = row["involved_classes"], row.get("missed_function", {})
    num_turns = 1 if turns == "first" else len(truth)
    reference = [ReferenceTurn(calls=[read_call(text) for text in calls], answer="") for calls in truth[:num_turns]]
    solution = [turn.model_dump()["calls"] for turn in reference if turn.calls]
    return Problem(
        id=row["id"],
        category=f"{category}/{'+'.join(classes)}",
        level=max(1, sum(map(len, solution))),
        requests=[_request(row, number) for number in range(num_turns)],
        world={
            "category": category,
            "involved_classes": classes,
            "initial_config": {name: row["initial_config"][name] for name in classes if name in row["initial_config"]},
            "held_out": held_out,
        },
        reference=reference,
        split_group=f"ground truth {json_hash(solution)[:16]}",
    )


def _request(row: Row, number: int) -> str:
    messages = [message["content"] for message in row["question"][number]]
    tools = {tool.name: tool for name in row["involved_classes"] for tool in tools_of_class(name)}
    shown = [tools[name] for name in row.get("missed_function", {}).get(str(number), [])]
    return "\n".join([*messages, *([announcement(shown)] if shown else [])])


def _joined(keys: Sequence[Keys]) -> list[str]:
    """One group name per pair of keys, the first of its ground truths; pairs that share a key, directly or through
    others, get the same name.
    """
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for number, truth in keys:
        if (row := f"row {number}") in parent:
            parent[root(truth)] = root(row)
        else:
            parent[row] = root(truth)
    return [root(truth) for _, truth in keys]
