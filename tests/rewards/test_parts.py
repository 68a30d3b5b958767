"""The built-in parts against numbers checked by hand, and what an environment must leave for them."""

from __future__ import annotations

from math import log2
from typing import Any

import pytest

from tasks.core.records import TokenSequence, Trajectory, Turn
from tasks.rewards.parts import reward
from tests.rewards.shaped import shaped
from tests.rewards.test_rewards import PROBLEM, episode


def value(name: str, played: Trajectory, **own: Any) -> float:
    return reward(PROBLEM, played, shaped({"name": name, "weight": 1.0, **own})).parts[name]


def found(ranked: Any, relevant: Any) -> Trajectory:
    played = episode("failure")
    played.details = {"retrieval": {"ranked": ranked, "relevant": relevant}}
    return played


def test_penalties_count_turns_invalid_calls_and_thousands_of_tokens():
    played = episode("failure", Turn("a"), Turn("b"), Turn("c"), num_calls=5, num_invalid_calls=2)
    played.sequences = [TokenSequence([7] * 4, [False, True, True, False])]
    assert value("step_penalty", played) == -3
    assert value("invalid_call_penalty", played) == -2
    assert value("token_cost", played) == -0.002


def test_what_a_replayed_start_gave_the_policy_earns_and_costs_nothing():
    """Two given turns of one valid call each, then "bye", which ends nothing well: its own turns alone count."""
    given = [Turn("a"), Turn("b", stop_reason="max_tokens_per_turn")]
    gives_up = episode("failure", *given, Turn("bye"), num_calls=0, num_invalid_calls=0)
    gives_up.num_replayed_turns = 2
    found = {name: value(name, gives_up) for name in ("call_validity", "format", "step_penalty")}
    assert found == {"call_validity": 0.0, "format": 1.0, "step_penalty": -1.0}


def test_without_token_ids_the_endpoints_usage_counts_and_none_is_an_error():
    played = episode("failure")
    played.sequences = []
    played.details = {"usage": {"output_tokens": 500}}
    assert value("token_cost", played) == -0.5
    played.details = {"usage": {"output_tokens": None}}
    with pytest.raises(ValueError, match="counted no tokens"):
        value("token_cost", played)


def test_progress_is_the_share_of_checks_and_all_of_it_for_a_success():
    played = episode("failure")
    played.checks = {"a": True, "b": False, "c": False, "d": False}
    assert value("progress", played) == 0.25
    assert value("progress", episode("success")) == 1.0


def test_ndcg_discounts_by_rank_and_recall_does_not():
    played = found(["x", "d1", "d2"], ["d1", "d2"])
    perfect = 1 + 1 / log2(3)
    assert value("ndcg", played, k=3) == pytest.approx((1 / log2(3) + 1 / 2) / perfect)
    assert value("recall", played, k=3) == 1.0
    assert value("ndcg", played, k=2) == pytest.approx(1 / log2(3) / perfect)
    assert value("recall", played, k=2) == 0.5


def test_one_document_cited_again_and_again_earns_nothing_more():
    assert value("ndcg", found(["d1"] * 10, ["d1", "d2"]), k=10) == value("ndcg", found(["d1"], ["d1", "d2"]), k=10) < 1
    assert value("recall", found(["d1"] * 10, ["d1", "d2"]), k=10) == 0.5


@pytest.mark.parametrize("name", ["ndcg", "recall"])
def test_where_nothing_is_relevant_nothing_is_earned(name: str):
    assert value(name, found(["d1"], []), k=3) == value(name, found([], ["d1"]), k=3) == 0.0


def test_the_judges_score_and_soundness_are_read_from_the_details():
    played = episode("failure")
    played.details = {"judge": {"score": 0.75, "soundness": 0.5}}
    assert (value("judge", played), value("soundness", played)) == (0.75, 0.5)


@pytest.mark.parametrize(
    ("name", "details", "message"),
    [
        ("judge", {}, "there is no judge with score"),
        ("soundness", {"judge": {"score": 1.0}}, "there is no judge with soundness"),
        ("judge", {"judge": {"score": float("nan")}}, "judge.score is no number from 0 to 1"),
        ("judge", {"judge": {"score": 1.5}}, "judge.score is no number from 0 to 1"),
        ("judge", {"judge": "good"}, "there is no judge with score"),
    ],
)
def test_what_the_environment_did_not_leave_is_an_error_and_never_a_0(name: str, details: dict[str, Any], message: str):
    played = episode("failure")
    played.details = details
    with pytest.raises(ValueError, match=message) as refusal:
        value(name, played)
    assert "\n" not in str(refusal.value)


def test_documents_that_are_no_texts_are_an_error():
    with pytest.raises(ValueError, match=r"retrieval\.ranked is no list of texts"):
        value("ndcg", found([1], ["d"]), k=1)
