"""Rewards: correctness first, parts that can never outweigh it, and no nonsense let through to the trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tasks.core.records import Problem, Score, Trajectory, Turn
from tasks.core.settings import Settings, load
from tasks.rewards.parts import check_score, outcome_reward, reward
from tasks.rewards.settings import RewardSettings
from tests.measurement.synthetic import trajectory as made_up
from tests.rewards.shaped import shaped

CALL = {"name": "check_card", "arguments": {"card_id": "card_3"}}
MALFORMED = {"malformed": True}
CORRECTNESS_ALONE = shaped()
SHAPED = shaped(format=0.2, call_validity=0.4)
WEIGHTS = {"outcome": 1.0, "format": 0.2, "call_validity": 0.4}
PROBLEM = Problem(
    id="p0",
    category="book/declined",
    level=3,
    requests=["Book a flight."],
    world={},
    reference=[{"calls": [], "answer": "Done."}],  # type: ignore[list-item]
    split_group="g",
)


def episode(outcome: str = "failure", *turns: Turn, num_calls: int = 0, num_invalid_calls: int = 0) -> Trajectory:
    return made_up(
        "p0",
        outcome == "success",
        outcome=outcome,
        turns=list(turns),
        num_calls=num_calls,
        num_invalid_calls=num_invalid_calls,
    )


class Params(Settings):
    """A whole `params.yaml` that has nothing but the rewards."""

    reward: RewardSettings


def read(parts: Any) -> RewardSettings:
    return load(Params, {"reward": {"parts": parts, "allow_undominated": False}}).reward


def test_a_success_with_every_turn_well_formed_and_every_call_valid_earns_all_parts():
    played = episode("success", Turn("call", calls=[CALL], replies=["ok"]), Turn("Booked."), num_calls=1)
    assert reward(PROBLEM, played, SHAPED) == Score(1.6, {"outcome": 1.0, "format": 0.2, "call_validity": 0.4}, WEIGHTS)


def test_of_four_turns_one_malformed_and_one_cut_leave_half_the_format_part():
    played = episode(
        "failure",
        Turn("good call", calls=[CALL], replies=["ok"]),
        Turn("one good, one bad", calls=[CALL, MALFORMED], replies=["ok", "no"]),
        Turn("ramble ramble", calls=[CALL], replies=["ok"], stop_reason="max_tokens_per_turn"),
        Turn("Booked."),
        num_calls=4,
        num_invalid_calls=1,
    )
    assert reward(PROBLEM, played, SHAPED).parts == pytest.approx({"outcome": 0.0, "format": 0.1, "call_validity": 0.3})
    assert reward(PROBLEM, played, SHAPED).reward == pytest.approx(0.4)


def test_a_turn_that_a_stop_string_ended_is_well_formed():
    played = episode("failure", Turn("<final>42</final>", stop_reason="stop_string"), Turn("Booked."))
    assert reward(PROBLEM, played, SHAPED).parts["format"] == 0.2


def test_never_calling_a_tool_earns_nothing_for_valid_calls():
    played = episode("failure", Turn("I would rather not."))
    assert reward(PROBLEM, played, SHAPED).parts == {"outcome": 0.0, "format": 0.2, "call_validity": 0.0}


def test_an_episode_cut_in_its_only_turn_earns_nothing():
    played = episode("overlong", Turn("ramble", stop_reason="max_tokens_per_episode"))
    assert reward(PROBLEM, played, SHAPED).reward == 0.0


@pytest.mark.parametrize("outcome", ["success", "failure", "max_turns", "overlong"])
def test_without_weights_it_is_correctness_alone(outcome: str):
    played = episode(outcome, Turn("call", calls=[CALL], replies=["ok"]), num_calls=1)
    assert reward(PROBLEM, played, CORRECTNESS_ALONE) == outcome_reward(PROBLEM, played)


def test_a_fault_of_the_environment_is_never_scored():
    with pytest.raises(AssertionError, match="an environment fault"):
        reward(PROBLEM, episode("environment_error"), SHAPED)


@pytest.mark.parametrize("weight", [-0.1, 0.0, math.nan, math.inf, "0.2", True])
def test_a_weight_must_be_a_finite_number_above_0(weight: Any):
    with pytest.raises(ValueError, match=r"^params.yaml: reward.parts.0.weight") as refusal:
        read([{"name": "format", "weight": weight}])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([{"name": "fromat", "weight": 0.1}], "reward.parts.0: 'fromat' is no built-in part.*Did you mean format"),
        ([{"name": "x", "weight": 0.1}], "reward.parts.0: 'x' is no built-in part.*Known: step_penalty"),
        ([{"name": "format", "weight": 0.1}] * 2, "reward: two of the parts are named 'format'"),
        ([{"name": "outcome", "weight": 1.0}], "reward.parts.0: outcome is always there with weight 1"),
        ([{"name": "ndcg", "weight": 0.1}], "reward.parts.0.k is missing"),
        ([{"name": "ndcg", "weight": 0.1, "k": 0}], "reward.parts.0.k = 0 is refused"),
        ([{"name": "format", "weight": 0.1, "k": 3}], "reward.parts.0.k is not a setting"),
        ([{"weight": 0.1}], "reward.parts.0: it has no name"),
        ([{"name": "format"}], "reward.parts.0.weight is missing"),
        (["format"], 'reward.parts.0: it is "format", and a part is a table. Write it as {name: format'),
        ([None], "reward.parts.0: it is null, and a part is a table"),
        ({"format": 0.1}, "reward.parts = a table is refused"),
    ],
)
def test_what_is_no_part_is_one_line_by_its_place(parts: Any, message: str):
    with pytest.raises(ValueError, match=rf"^params.yaml: {message}") as refusal:
        read(parts)
    assert "\n" not in str(refusal.value)


def test_a_good_score_comes_back_as_it_was():
    score = Score(1.2, {"outcome": 1.0, "format": 0.2})
    assert check_score(score, problem=PROBLEM, trajectory=episode()) is score


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.5", True, 10**400, [1.0]])
def test_a_reward_that_is_no_finite_number_names_the_problem_and_the_trajectory(value: Any):
    played = made_up("p0", False, sample_index=3)
    with pytest.raises(ValueError) as refusal:
        check_score(Score(value, {}), problem=PROBLEM, trajectory=played)
    message = str(refusal.value)
    assert message.startswith("the reward of problem 'p0' (draw 0, sample 3; the episode ended in failure): ")
    assert f"its reward is {value!r}" in message and "Make it return a Score of finite floats" in message


def test_a_part_that_is_nan_is_named():
    with pytest.raises(ValueError, match="its part 'style' is nan"):
        check_score(Score(1.0, {"style": math.nan}), problem=PROBLEM, trajectory=episode())


def test_a_reward_that_returns_no_score_is_refused():
    with pytest.raises(ValueError, match="returned None, which is not a Score"):
        check_score(None, problem=PROBLEM, trajectory=episode())
