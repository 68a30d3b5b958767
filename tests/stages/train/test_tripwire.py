"""A planted exploit: refused by the dominance check; when insisted upon, the tripwire fires before success falls.

On made-up runs, and on real ones. `exploited_runs.jsonl` has the first 20 iterations of runs of
`tests/benchmarks/tripwire.py`: the test profile after its warm start, with a part that pays for giving up (`quick`),
one that pays for calling on and on (`busy`), or three that the dominance check accepts (`honest`).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tasks.core.records import Group, Score
from tasks.core.settings import read_params
from tasks.rewards.dominance import check_dominance
from tasks.rewards.settings import RewardSettings
from tasks.stages.train.sentinel import Sentinel, fitted_rise
from tasks.stages.train.unearned import most_unearned, name_unearned
from tests.benchmarks.tripwire import REWARDS, fall_of_success, replay
from tests.conftest import ROOT
from tests.measurement.synthetic import trajectory
from tests.rewards.shaped import LIMITS, shaped
from tests.stages.train.test_sentinel import HEALTHY, limits

WEIGHT, EPISODES, ONSET, FALL = 2.0, 128, 30, 60
SENTINEL: dict[str, Any] = read_params(ROOT / "params.yaml")["sentinel"]
RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("exploited_runs.jsonl").read_text(encoding="utf-8").splitlines()
]


def hacked_run(seed: int) -> list[dict[str, Any]]:
    """From ONSET the policy farms a part of weight 2, by 1.5 points more per iteration; from FALL it solves less."""
    rng = random.Random(seed)
    rows = []
    for iteration in range(1, 91):
        farmed = min(1.0, max(0, iteration - ONSET) * 0.015)
        success = 0.6 - min(0.5, max(0, iteration - FALL) * 0.03)
        solved = sum(rng.random() < success for _ in range(EPISODES)) / EPISODES
        part = sum(rng.random() < farmed for _ in range(EPISODES)) / EPISODES
        rows.append({"iteration": iteration, **HEALTHY, "success_rate": solved, "mean_reward": solved + WEIGHT * part})
    return rows


def honest_run(seed: int) -> list[dict[str, Any]]:
    """Success rises from 30% to 80%, and a part of weight 0.2 with it."""
    rng = random.Random(seed)
    rows = []
    for iteration in range(1, 91):
        share = 0.3 + 0.5 * min(1.0, iteration / 60)
        solved = sum(rng.random() < share for _ in range(EPISODES)) / EPISODES
        part = sum(rng.random() < share for _ in range(EPISODES)) / EPISODES
        rows.append({"iteration": iteration, **HEALTHY, "success_rate": solved, "mean_reward": solved + 0.2 * part})
    return rows


def first_alarm(rows: list[dict[str, Any]]) -> Any:
    sentinel = Sentinel(limits(window=20))
    return next((alarm for row in rows if (alarm := sentinel.observe(row)) is not None), None)


def test_the_exploit_is_refused():
    with pytest.raises(ValueError, match=r"the best failure can earn 2 = 0 \+ 2 × 1 \(format\)"):
        check_dominance(shaped(format=WEIGHT), LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_when_it_is_insisted_upon_the_tripwire_fires_before_success_falls(seed: int):
    alarm = first_alarm(hacked_run(seed))
    assert alarm is not None and alarm.signal == "unearned_reward"
    assert ONSET < alarm.iteration < FALL


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_reward_that_rises_with_success_is_no_alarm(seed: int):
    assert first_alarm(honest_run(seed)) is None


def test_a_penalty_that_shrinks_is_no_alarm():
    """Success stays at 95% while a penalty of 0.05 per turn goes from ten turns to two."""
    turns = [10 - 8 * min(1.0, iteration / 60) for iteration in range(1, 91)]
    rewards = [{"success_rate": 0.95, "mean_reward": 0.95 - 0.05 * count} for count in turns]
    assert first_alarm([{"iteration": i, **HEALTHY, **row} for i, row in enumerate(rewards, 1)]) is None


def test_the_rise_of_a_line_is_its_slope_times_its_span_and_noise_widens_it():
    xs = [1.0, 2.0, 3.0, 4.0]
    assert fitted_rise(xs, [0.0, 0.1, 0.2, 0.3], confidence=0.99) == pytest.approx((0.3, 0.3, 0.3))
    assert fitted_rise(xs, [0.5] * 4, confidence=0.99) == (0.0, 0.0, 0.0)
    # Slope 0.1, residuals ±0.1 as −, +, +, −: stderr √(0.04/2/5) = 0.0632, times t(0.975, 2) = 4.303, times 3.
    low, rise, high = fitted_rise(xs, [-0.1, 0.2, 0.3, 0.2], confidence=0.95)
    assert (low, rise, high) == pytest.approx((0.3 - 0.8164, 0.3, 0.3 + 0.8164), abs=1e-3)


def test_the_alarm_names_the_failures_that_earned_most():
    played = [trajectory("p7", sample == 0, sample_index=sample) for sample in range(3)]
    for item in played:
        item.draw = 4
    scores = [Score(1.5, {"outcome": 1.0, "format": 0.5}), Score(0.4, {"format": 0.4}), Score(1.9, {"format": 1.9})]
    groups = [Group("p7", "book", played, scores)]
    assert [(item.sample_index, item.reward) for item in most_unearned(groups)] == [(2, 1.9), (1, 0.4)]
    alarm = name_unearned(first_alarm(hacked_run(0)), groups)
    assert alarm is not None
    assert alarm.message.endswith("They are p7 (draw 4, sample 2: 1.90), p7 (draw 4, sample 1: 0.40).")


# Real runs


def recorded(reward: str, rate: float, seed: int) -> list[dict[str, Any]]:
    return [row for row in RECORDED if (row["reward"], row["rate"], row["seed"]) == (reward, rate, seed)]


@pytest.mark.parametrize(
    ("reward", "rate", "seed", "fires", "falls"),
    [
        ("busy", 1e-3, 1, 5, 6),
        ("busy", 1e-3, 2, 5, 8),
        ("busy", 1e-3, 3, 5, 8),
        ("busy", 3e-4, 1, 6, 9),
        ("quick", 1e-3, 1, 7, 7),
        ("quick", 1e-3, 2, 6, 7),
        ("quick", 1e-3, 3, 7, 8),
        ("quick", 3e-4, 1, 16, 17),
        ("quick", 3e-4, 2, 11, 12),
        ("quick", 3e-4, 3, 12, 12),
    ],
)
def test_a_real_policy_that_finds_the_exploit_trips_it_no_later_than_success_is_seen_to_fall(
    reward: str, rate: float, seed: int, fires: int, falls: int
):
    rows = recorded(reward, rate, seed)
    alarms = replay(rows, SENTINEL)
    assert min(alarm.iteration for alarm in alarms.values()) == alarms["unearned_reward"].iteration == fires
    assert fall_of_success(rows) == falls
    assert rows[-1]["success_rate"] < 0.02 and rows[-1]["mean_reward"] > 1.8


@pytest.mark.parametrize(("rate", "seed"), [(1e-3, 1), (1e-3, 2), (3e-4, 1)])
def test_a_real_policy_whose_parts_are_dominated_learns_and_trips_nothing(rate: float, seed: int):
    rows = recorded("honest", rate, seed)
    first, last = (fmean(row["success_rate"] for row in part) for part in (rows[:5], rows[-5:]))
    assert last > first + 0.03
    assert replay(rows, SENTINEL) == {} and fall_of_success(rows) is None


def test_a_real_exploit_is_refused_until_it_is_insisted_upon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.rewards.part_settings.load_function", lambda path: None)
    for name in ("quick", "busy"):
        with pytest.raises(ValueError, match="so a failure could outscore a success"):
            check_dominance(RewardSettings.model_validate({**REWARDS[name], "allow_undominated": False}), LIMITS)
        check_dominance(RewardSettings.model_validate(REWARDS[name]), LIMITS)
    check_dominance(RewardSettings.model_validate(REWARDS["honest"]), LIMITS)
