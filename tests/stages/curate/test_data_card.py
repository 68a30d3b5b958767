"""The data card: counts a person can check by hand, lengths by nearest rank, and a page that runs nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tasks.core.records import Problem
from tasks.stages.curate.data_card import (
    describe_splits,
    distributions,
    measures,
    render_card,
    rendered,
    shared_split_groups,
)
from tasks.tools.authoring import ToolEnvironment, ToolEpisode
from tasks.tools.base import Tool

SCRIPT = "<script>alert(1)</script>"


@dataclass(frozen=True, slots=True)
class Row:
    problem: Problem


class Doors(ToolEnvironment):
    """A world of two tools, of which a problem may be shown one."""

    name = SCRIPT
    episode_class = ToolEpisode
    tools = (Tool("open", "Open.", {}), Tool("close", "Close.", {}))

    def tools_for(self, problem: Problem) -> tuple[Tool, ...]:
        return self.tools[: problem.world["shown"]]


def row(id: str, *, calls: int = 1, group: str = "g", category: str = "c", request: str = "Go.", shown: int = 2) -> Row:
    turn = {"calls": [{"name": "open", "arguments": {}}] * calls, "answer": ""}
    return Row(
        Problem.model_validate(
            {
                "id": id,
                "category": category,
                "level": 1,
                "requests": [request],
                "world": {"shown": shown},
                "reference": [turn],
                "split_group": group,
            }
        )
    )


def card(splits: dict[str, list[Row]], **changed: Any) -> dict[str, Any]:
    described = describe_splits(Doors(), splits, changed.pop("left_out", {}))
    rest = {"environment": SCRIPT, "fingerprint": "f00", "split": "groups", "num_demonstrations": 0, "expectations": []}
    rest["demonstrations_by_category"] = {}
    return {**described, **rest, **changed}


def test_percentiles_are_values_of_problems_by_nearest_rank() -> None:
    # Of 1…20 the median is the 10th and the 95th percentile the 19th; of a single one all are that one.
    rows = [dict.fromkeys(("num_calls", "num_requests", "num_tools", "prompt_characters"), n) for n in range(20, 0, -1)]
    assert distributions(rows)["num_calls"] == {"min": 1, "median": 10, "p95": 19, "max": 20}
    assert set(distributions(rows[:1])["num_tools"].values()) == {20}
    assert distributions([]) == {}


def test_a_prompt_is_the_first_request_and_the_json_of_the_tools_that_are_shown_for_it() -> None:
    one = '{"type": "function", "function": {"name": "open", "description": "Open.", "parameters": {}}}'
    assert rendered(Doors.tools[:1]) == one
    measure = measures(Doors())
    shown_one, shown_two = measure(row("a", calls=3, shown=1).problem), measure(row("b", shown=2).problem)
    assert shown_one == {"num_calls": 3, "num_requests": 1, "num_tools": 1, "prompt_characters": len("Go.") + len(one)}
    assert shown_two["num_tools"] == 2
    assert shown_two["prompt_characters"] == len("Go.") + len(rendered(Doors.tools))


def test_what_splits_share_is_counted_in_groups_and_in_problems() -> None:
    splits = {
        "train": [row("a", group="x"), row("b", group="x"), row("c", group="y")],
        "select": [row("d", group="x")],
        "test": [row("e", group="z")],
    }
    assert shared_split_groups(splits) == {
        "num_groups": 3,
        "num_shared": 1,
        "num_problems": {"train": 2, "select": 1, "test": 0},
        "between": {"train and select": 1},
    }


def test_the_card_counts_problems_by_category_and_names_some_of_what_was_left_out() -> None:
    splits = {
        "train": [row("a", category="x"), row("b", category="y", group="h")],
        "select": [row("c", category="x")],
        "test": [],
    }
    found = card(splits, left_out={"too long": [f"t{n}" for n in range(12)], "nothing of this": []})
    assert found["by_category"] == {"train": {"x": 1, "y": 1}, "select": {"x": 1}, "test": {}}
    assert found["num_split_groups"] == {"train": 2, "select": 1, "test": 0}
    assert found["left_out"] == [{"reason": "too long", "num_problems": 12, "ids": [f"t{n}" for n in range(10)]}]
    assert json.loads(json.dumps(found)) == found


def test_the_page_escapes_what_rows_hold_and_asks_for_nothing_from_anywhere() -> None:
    splits = {"train": [row(SCRIPT, category=SCRIPT)], "select": [row("b", category=SCRIPT)], "test": [row("c")]}
    page = render_card(card(splits, left_out={SCRIPT: [SCRIPT]}))
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "default-src 'none'" in page and "prefers-color-scheme: dark" in page


@pytest.mark.parametrize(
    ("group", "said"), [("g", "1 of 2 groups are in several splits"), ("other", "each of the 3 groups is in one split")]
)
def test_the_page_says_whether_splits_share_groups(group: str, said: str) -> None:
    splits = {"train": [row("a")], "select": [row("b", group=group)], "test": [row("c", group="t")]}
    assert said in render_card(card(splits))


def test_a_long_name_may_break_after_its_parts() -> None:
    splits = {"train": [row("a", category="book/sold_out")], "select": [row("b")], "test": [row("c")]}
    page = render_card(card(splits, left_out={"more than curate.max_test_problems": ["x"]}))
    assert "book/<wbr>sold_<wbr>out" in page and "curate.<wbr>max_<wbr>test_" in page


def test_a_card_without_a_problem_is_still_a_page() -> None:
    page = render_card(card({"train": [], "select": [], "test": []}))
    assert "every row of the source is in a split" in page
