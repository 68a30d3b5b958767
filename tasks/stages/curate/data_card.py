"""The data card: what is in the splits, what was left out and why, and which split groups they share.

It depends on the problems alone. No model is known at curation, so lengths are in characters.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.pages import render
from tasks.core.records import Problem
from tasks.stages.curate.references import Row
from tasks.stages.curate.splitting import SPLITS, HasProblem, Splits, shared_groups
from tasks.tools.base import Environment, SourceCount, Tool

TEMPLATES = Path(__file__).parent / "templates"
MAX_IDS = 10  # shown of the ids that were left out
PERCENTILES = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
MEASURES = {
    "num_calls": "calls of the reference",
    "num_requests": "user requests",
    "num_tools": "tools shown with the first request",
    "prompt_characters": "characters of the prompt",
}
EARLIER_TEST_SETS = "in a test set before curate.test_rotation"
LATER_TEST_SETS = "kept for a test set after curate.test_rotation"
OF_OTHER_TEST_SETS = (EARLIER_TEST_SETS, LATER_TEST_SETS)


def describe_splits(
    environment: Environment, splits: Splits[HasProblem], left_out: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    problems = {name: [row.problem for row in splits[name]] for name in SPLITS}
    measure = measures(environment)
    return {
        "num_problems": {name: len(problems[name]) for name in SPLITS},
        "num_split_groups": {name: len({problem.split_group for problem in problems[name]}) for name in SPLITS},
        "by_category": {name: dict(Counter(problem.category for problem in problems[name])) for name in SPLITS},
        "distributions": {name: distributions([measure(problem) for problem in problems[name]]) for name in SPLITS},
        "shared_split_groups": shared_split_groups(splits),
        "left_out": [
            {"reason": reason, "num_problems": len(ids), "ids": list(ids[:MAX_IDS])}
            for reason, ids in left_out.items()
            if ids
        ],
    }


def list_left_out(
    rows: Sequence[Row],
    unique: Sequence[Row],
    splits: Splits[Row],
    other_tests: tuple[Sequence[Row], Sequence[Row]],
    asked_before: Sequence[Row],
    source_count: SourceCount | None,
) -> dict[str, Sequence[str]]:
    """The ids that are in no split, by reason. `other_tests`: the rows of the test sets before and after this one;
    `asked_before`: those that are not in `rows`, since an earlier split asks the same.
    """
    before, after = other_tests
    first = {row.position for row in unique}
    used = {row.position for some in (before, after, *(splits[name] for name in SPLITS)) for row in some}
    return {
        **(source_count.left_out if source_count else {}),
        "the same content under another id": [row.problem.id for row in rows if row.position not in first],
        "asks what an earlier split asks in the same world": [row.problem.id for row in asked_before],
        "more than curate.max_select_problems or curate.max_test_problems": [
            row.problem.id for row in unique if row.position not in used
        ],
        EARLIER_TEST_SETS: [row.problem.id for row in before],
        LATER_TEST_SETS: [row.problem.id for row in after],
    }


def measures(environment: Environment) -> Callable[[Problem], dict[str, int]]:
    """The function that measures a problem. It renders each set of tools once, however many problems have it."""
    lengths: dict[tuple[str, ...], int] = {}

    def measure(problem: Problem) -> dict[str, int]:
        tools = environment.tools_for(problem)
        names = tuple(tool.name for tool in tools)
        if names not in lengths:
            lengths[names] = len(rendered(tools))
        return {
            "num_calls": sum(len(turn.calls) for turn in problem.reference),
            "num_requests": len(problem.requests),
            "num_tools": len(tools),
            "prompt_characters": len(environment.rules_for(problem)) + len(problem.requests[0]) + lengths[names],
        }

    return measure


def rendered(tools: Sequence[Tool]) -> str:
    """The tools as most chat templates show them: JSON, one per line."""
    return "\n".join(json.dumps(tool.schema(), ensure_ascii=False) for tool in tools)


def distributions(rows: Sequence[Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Minimum, median, 95th percentile and maximum of each measure, by nearest rank; empty without rows."""
    if not rows:
        return {}
    ordered = {name: sorted(row[name] for row in rows) for name in MEASURES}
    ranks = {word: max(0, math.ceil(share * len(rows)) - 1) for word, share in PERCENTILES.items()}
    return {name: {word: values[rank] for word, rank in ranks.items()} for name, values in ordered.items()}


def shared_split_groups(splits: Splits[HasProblem]) -> dict[str, Any]:
    shared = shared_groups(splits)
    return {
        "num_groups": len({row.problem.split_group for name in SPLITS for row in splits[name]}),
        "num_shared": len(shared),
        "num_problems": {name: sum(row.problem.split_group in shared for row in splits[name]) for name in SPLITS},
        "between": dict(Counter(" and ".join(names) for names in shared.values())),
    }


def render_card(card: Mapping[str, Any]) -> str:
    categories: Counter[str] = Counter()
    for counts in card["by_category"].values():
        categories.update(counts)
    most = {
        name: max((split[name]["max"] for split in card["distributions"].values() if split), default=1)
        for name in MEASURES
    }
    return render(
        TEMPLATES,
        "card.html.jinja",
        card=card,
        splits=SPLITS,
        categories=sorted(categories.items(), key=lambda item: (-item[1], item[0])),
        measures=MEASURES,
        most=most,
    )
