"""The dominance check: what a failure could earn more than a success is refused, and what is accepted never does."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tasks.core.records import TokenSequence, Trajectory, Turn
from tasks.core.settings import load, read_params
from tasks.rewards.dominance import check_dominance, outcome_dominates
from tasks.rewards.limits import EpisodeLimits
from tasks.rewards.parts import reward
from tasks.rewards.settings import RewardSettings
from tasks.stages.train.settings import TrainSections, episode_limits
from tests.conftest import ROOT
from tests.learning.options import NO_EXPLORATION
from tests.rewards.shaped import LIMITS, shaped
from tests.rewards.test_rewards import PROBLEM, episode
from tests.tools.judge.endpoint import judge_row
from tests.worlds import OWN_SETTINGS


def test_a_step_penalty_of_0_05_totals_a_half_in_ten_turns_and_of_0_1_the_whole_outcome():
    assert outcome_dominates(shaped(step_penalty=0.05), LIMITS)
    assert not outcome_dominates(shaped(step_penalty=0.1), LIMITS)


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
    assert outcome_dominates(settings, LIMITS) is accepted


def test_shorter_episodes_allow_a_larger_penalty_per_turn():
    assert outcome_dominates(shaped(step_penalty=0.1), EpisodeLimits(max_turns=9, max_calls=9, max_sampled_tokens=9))


def test_params_are_refused_by_the_limits_they_have():
    params = read_params(ROOT / "params.yaml")
    params["reward"] = {"parts": [{"name": "step_penalty", "weight": 0.1}], "allow_undominated": False}
    with pytest.raises(ValueError, match=r"^params.yaml: reward.parts: the best failure .* within 10 turns"):
        load(TrainSections, params)
    params["sampling"]["max_turns"] = 9
    load(TrainSections, params)


def test_an_agent_that_drives_itself_may_write_a_sequence_a_turn_and_begins_at_the_start():
    """Ten turns of 28 tokens are 280, fewer than the 420 of one episode; of 100 tokens they are 1,000."""
    params = read_params(ROOT / "params.yaml")
    params["environment"] |= {"name": "agent", "settings": OWN_SETTINGS["agent"]}
    sections = load(TrainSections, params)
    limits = episode_limits(sections.sampling, sections.environment)
    assert limits.max_sampled_tokens == 280
    longer = sections.sampling.model_copy(update={"max_tokens_per_turn": 100})
    assert episode_limits(longer, sections.environment).max_sampled_tokens == 1000
    prefixes = {"source": "own", "share": [{"iteration": 1, "value": 0.5}], "depth": [{"iteration": 1, "value": 0.5}]}
    params["train"]["exploration"] = NO_EXPLORATION | {"prefixes": prefixes}
    with pytest.raises(ValueError, match=r"^params.yaml: train.exploration.prefixes begins .* to null"):
        load(TrainSections, params)


@pytest.mark.parametrize("name", ["judge", "soundness"])
def test_a_part_that_a_judge_scores_is_refused_where_there_is_no_judge(name: str, tmp_path: Path):
    params = read_params(ROOT / "params.yaml")
    params["reward"] = {"parts": [{"name": name, "weight": 0.2}], "allow_undominated": False}
    with pytest.raises(
        ValueError, match=rf"^params.yaml: reward.parts has {name}, .*Fill in environment.judge"
    ) as told:
        load(TrainSections, params)
    assert "\n" not in str(told.value)
    params["environment"]["judge"] = judge_row("http://h/v1", tmp_path, decides=False)
    load(TrainSections, params)


# Each accepted configuration against every short episode

SHORT = EpisodeLimits(max_turns=2, max_calls=4, max_sampled_tokens=40)
WEIGHT = st.floats(0.01, 2.0)


def short_episodes(outcome: str) -> list[Trajectory]:
    """Every mix of 0 to 2 turns, good or malformed, 0 to 4 calls, tokens, checks, rankings and judgements."""
    found = []
    for num_turns, well_formed in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)):
        for num_calls, num_invalid in ((0, 0), (1, 0), (4, 0), (1, 1), (4, 1), (4, 4)):
            for num_tokens, share in product((0, 40), (0.0, 1.0)):
                turns = [Turn("ok") for _ in range(well_formed)]
                turns += [Turn("no", calls=[{"malformed": True}]) for _ in range(num_turns - well_formed)]
                played = episode(outcome, *turns, num_calls=num_calls, num_invalid_calls=num_invalid)
                mask = [False] + [True] * num_tokens + [False] * (40 - num_tokens)
                played.sequences = [TokenSequence([1] * 41, mask)]
                played.checks = {"a": share == 1.0, "b": outcome == "success"}
                played.details = {
                    "judge": {"score": share, "soundness": 1 - share},
                    "retrieval": {"ranked": ["d", "d", "x"], "relevant": ["d"] if share else ["y"]},
                }
                found.append(played)
    return found


FAILURES, SUCCESSES = short_episodes("failure"), short_episodes("success")


@pytest.mark.slow
@hypothesis_settings(max_examples=60, deadline=None)
@given(
    weights=st.dictionaries(
        st.sampled_from(
            [
                "step_penalty",
                "invalid_call_penalty",
                "token_cost",
                "call_validity",
                "format",
                "progress",
                "judge",
                "soundness",
            ]
        ),
        WEIGHT,
        max_size=4,
    ),
    ranked=st.dictionaries(st.sampled_from(["ndcg", "recall"]), st.tuples(WEIGHT, st.integers(1, 3)), max_size=2),
    shrink=st.sampled_from([1.0, 0.3, 0.1]),
)
def test_in_what_is_accepted_no_failure_outscores_a_success(
    weights: dict[str, float], ranked: dict[str, tuple[float, int]], shrink: float
):
    parts: list[dict[str, Any]] = [
        {"name": name, "weight": weight * shrink, "k": k} for name, (weight, k) in ranked.items()
    ]
    parts += [{"name": name, "weight": weight * shrink} for name, weight in weights.items()]
    chosen = shaped(*parts)
    if not outcome_dominates(chosen, SHORT):
        with pytest.raises(ValueError, match="the best failure can earn"):
            check_dominance(chosen, SHORT)
        return
    best_failure = max(reward(PROBLEM, played, chosen).reward for played in FAILURES)
    worst_success = min(reward(PROBLEM, played, chosen).reward for played in SUCCESSES)
    assert best_failure < worst_success


def test_a_refusal_of_one_part_alone_is_never_for_nothing():
    """Two turns at 0.5 each: the worst success earns what the best failure does."""
    chosen = shaped(step_penalty=0.5)
    assert not outcome_dominates(chosen, SHORT)
    assert min(reward(PROBLEM, played, chosen).reward for played in SUCCESSES) == 0.0
    assert max(reward(PROBLEM, played, chosen).reward for played in FAILURES) == 0.0
