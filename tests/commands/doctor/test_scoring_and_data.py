"""Success, reward and the curated files: what would be learnt wrongly, or measured wrongly, is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.doctor import scoring
from tasks.core.records import Score
from tasks.environments.travel_desk.environment import TravelDeskEpisode
from tasks.tools.base import Verdict
from tests.commands.doctor.project import edit, found, in_world, look


class Unfair(TravelDeskEpisode):
    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(self.world["kind"] != "quote", {"kind": self.world["kind"] != "quote"})


def test_a_reference_that_does_not_score_1_is_named_with_its_failed_check(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = in_world(monkeypatch, Unfair)
    examined = look("references score 1", artifacts, environment__name=name)
    found(examined, "fail", ": kind", "Correct the reference or the check of success")
    idle = look("doing nothing", artifacts, environment__name=name)
    found(idle, "warn", "an empty message already succeeds on", "asks for too little")
    assert "7 of 11 types: book/declined; book/none; book/sold_out and 4 more" in idle.finding


@pytest.mark.parametrize(
    ("value", "says"), [(2.5, "rewards lie outside 1 to 1"), (float("nan"), "not a finite number")]
)
def test_a_reward_out_of_its_range_fails(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, value: float, says: str
) -> None:
    monkeypatch.setattr(scoring, "reward", lambda *_: Score(value, {}))
    found(look("references score 1", artifacts), "fail", says, "")


def test_a_failure_that_earns_as_much_as_a_success_fails(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "reward", lambda *_: Score(1.0, {}))
    found(look("doing nothing", artifacts), "fail", "a failure earns 1", "less than 1")


COPIED: dict[str, Any] = {
    "requests": ["Cancel  booking B1."],
    "world": {"kind": "cancel", "booking": "B1", "error": "none", "seed": 1},
}
LEAKS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], None], str, str]] = {
    "group": ("test", lambda rows: rows[0].update(split_group="STOLEN"), "1 split groups", "STOLEN (train, test)"),
    "id": ("test", lambda rows: rows[0].update(id="STOLEN"), "1 ids", "STOLEN (train, test)"),
    "content": ("select", lambda rows: rows[0].update(COPIED), "1 problems are in two", "(train, select)"),
}


@pytest.mark.parametrize("what", LEAKS)
def test_what_is_in_two_splits_fails(artifacts: Path, what: str) -> None:
    split, change, counted, named = LEAKS[what]
    edit(artifacts, "train", lambda rows: rows[0].update({**COPIED, "requests": ["cancel booking b1."]}))
    edit(artifacts, "train", lambda rows: rows[1].update(id="STOLEN", split_group="STOLEN"))
    edit(artifacts, "demonstrations", lambda rows: rows.clear())
    assert look("splits", artifacts).result == "pass"
    edit(artifacts, split, change)
    examined = look("splits", artifacts)
    found(examined, "fail", counted, "Run `python -m tasks curate` again")
    assert named in examined.finding


def test_a_demonstration_of_a_test_problem_fails_and_a_type_without_training_warns(artifacts: Path) -> None:
    edit(artifacts, "test", lambda rows: rows[0].update(category="rare"))
    found(look("splits", artifacts), "warn", "1 types of select or test are not in train: rare", "Write more rows")
    edit(artifacts, "demonstrations", lambda rows: rows[0].update(problem_id="of test"))
    found(look("splits", artifacts), "fail", "not in train: of test", "would learn what it is judged by")


def test_a_curated_file_that_was_edited_fails(artifacts: Path) -> None:
    edit(artifacts, "test", lambda rows: rows.pop())
    found(look("curated files", artifacts), "fail", "test.jsonl changed after curation", "never its results")
