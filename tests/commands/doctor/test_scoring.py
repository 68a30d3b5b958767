"""Success, reward and the curated files: what would be learnt wrongly, or measured wrongly, is found."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tasks.commands.doctor import scoring
from tasks.core.records import Score
from tasks.environments.travel_desk.environment import TravelDeskEpisode
from tasks.tools.base import Verdict
from tests.commands.doctor.project import edit, found, in_world, look, look_at
from tests.tools.judge.endpoint import Endpoint, judge_row, opinion, serve


class Unfair(TravelDeskEpisode):
    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(self.world["kind"] != "quote", {"kind": self.world["kind"] != "quote"})


@pytest.mark.slow
def test_a_reference_that_does_not_score_1_is_named_with_its_failed_check(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = in_world(monkeypatch, Unfair)
    examined = look("references score 1", artifacts, environment__name=name)
    found(examined, "fail", ": kind", "Correct the reference or the check of success")
    idle = look("doing nothing", artifacts, environment__name=name)
    found(idle, "warn", "an empty message already succeeds on", "is too weak")
    assert "42 of 66 problems: book/declined (6); book/none (6); book/sold_out (6) and 4 more" in idle.finding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "says"), [(2.5, "rewards are outside 1 to 1"), (float("nan"), "not a finite number")]
)
def test_a_reward_out_of_its_range_fails(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, value: float, says: str
) -> None:
    monkeypatch.setattr(scoring, "reward", lambda *_: Score(value, {}))
    found(look("references score 1", artifacts), "fail", says, "")


def test_a_reward_that_differs_when_the_same_episode_is_scored_again_fails(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = itertools.cycle([1.0, 1.0, 0.75])
    monkeypatch.setattr(scoring, "_is_within", lambda *_: True)
    monkeypatch.setattr(scoring, "reward", lambda *_: Score(next(rewards), {}))
    found(look("references score 1", artifacts), "fail", "another reward when it is scored again", "random numbers")


def test_fewer_test_problems_than_promotion_asks_for_fail(artifacts: Path) -> None:
    few = look("test problems", artifacts, promote__min_unseen_problems=1000)
    found(few, "fail", ", and promote.min_unseen_problems asks for 1,000", "or lower promote.min_unseen_problems")


def test_a_failure_that_earns_as_much_as_a_success_fails(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "reward", lambda *_: Score(1.0, {}))
    found(look("doing nothing", artifacts), "fail", "a failure earns 1", "a success 1 or more")


def test_silence_meets_every_request_of_a_problem(artifacts: Path) -> None:
    """And not the first alone, after which the next one found nobody to write."""

    def ask_again(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["requests"], row["reference"] = row["requests"] * 2, row["reference"] * 2

    edit(artifacts, "train", ask_again)
    found(look("doing nothing", artifacts), "pass", "an empty message fails on", "")


@pytest.mark.slow
@pytest.mark.parametrize("decides", [False, True])
def test_a_part_that_a_judge_scores_is_left_out_and_a_judge_that_decides_nothing_costs_nothing(
    artifacts: Path, tmp_path: Path, decides: bool
) -> None:
    parts = [{"name": "judge", "weight": 0.2}, {"name": "soundness", "weight": 0.1}, {"name": "format", "weight": 0.1}]
    with serve(Endpoint(says=lambda messages, request: opinion(score=0.5))) as endpoint:
        judge = judge_row(endpoint.url, tmp_path, decides=decides)
        checks = ["references score 1", "doing nothing"]
        examined = look_at(checks, artifacts, environment__judge=judge, reward__parts=parts)
        assert [item.result for item in examined] == ["pass", "pass"], examined
        assert bool(endpoint.asked) == decides
