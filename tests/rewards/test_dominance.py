"""The dominance check: what a failure could earn more than a success is refused, and what is accepted never does."""

from __future__ import annotations

import pytest

from tasks.core.settings import load, read_params
from tasks.rewards.dominance import check_dominance, is_dominated
from tasks.rewards.limits import EpisodeLimits
from tasks.rewards.settings import RewardSettings
from tasks.stages.train.settings import TrainSections
from tests.conftest import ROOT
from tests.rewards.shaped import LIMITS, shaped


def test_a_step_penalty_of_0_05_totals_a_half_in_ten_turns_and_of_0_1_the_whole_outcome():
    assert is_dominated(shaped(step_penalty=0.05), LIMITS)
    assert not is_dominated(shaped(step_penalty=0.1), LIMITS)


def test_a_refusal_shows_the_arithmetic_in_one_line():
    with pytest.raises(ValueError, match=r"^reward.parts: ") as refusal:
        check_dominance(shaped(format=0.6, step_penalty=0.05), LIMITS)
    message = str(refusal.value)
    assert "\n" not in message and "reward.allow_undominated: true" in message
    assert "the best failure can earn 0.6 = 0 + 0.6 × 1 (format)" in message
    assert "the worst success 0.5 = 1 - 0.05 × 10 (step_penalty)" in message
    assert "10 turns, 330 calls and 420 sampled tokens" in message


def test_who_insists_is_not_refused():
    check_dominance(shaped(step_penalty=0.1, is_insisted=True), LIMITS)


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        (shaped(), True),
        (shaped(format=0.5, call_validity=0.4999), True),
        (shaped(format=0.5, call_validity=0.5), False),  # equal is no longer more
        (shaped(progress=5.0), True),  # a success has all of it
        (shaped(token_cost=2.0), True),  # 0.42 thousand tokens at most
        (shaped(token_cost=2.4), False),
        (shaped(invalid_call_penalty=0.003), True),  # 330 calls at most
        (shaped(invalid_call_penalty=0.2), False),
        (shaped({"name": "ndcg", "weight": 0.9, "k": 3}), True),
        (shaped(judge=0.6, soundness=0.6), False),
    ],
)
def test_bounds_follow_from_the_limits_of_an_episode(settings: RewardSettings, accepted: bool):
    assert is_dominated(settings, LIMITS) is accepted


def test_shorter_episodes_allow_a_larger_penalty_per_turn():
    assert is_dominated(shaped(step_penalty=0.1), EpisodeLimits(max_turns=9, max_calls=9, max_sampled_tokens=9))


def test_params_are_refused_by_the_limits_they_have():
    params = read_params(ROOT / "params.yaml")
    params["reward"] = {"parts": [{"name": "step_penalty", "weight": 0.1}], "allow_undominated": False}
    with pytest.raises(ValueError, match=r"^params.yaml: reward.parts: the best failure .* within 10 turns"):
        load(TrainSections, params)
    params["sampling"]["max_turns"] = 9
    load(TrainSections, params)
