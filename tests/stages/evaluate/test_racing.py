"""The race: who is dropped when, what it costs, and simulations of what it promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tasks.core.records import Problem, Trajectory
from tasks.measurement.intervals import paired_interval
from tasks.measurement.statistics import Success, success_by_problem
from tasks.stages.evaluate.racing import Race, Round, block_ends, chance_of_losing_its_place, race
from tasks.stages.evaluate.settings import RacingSettings
from tests import tiny
from tests.measurement.synthetic import trajectory

PROBLEMS = tiny.problems(400)
RULES = RacingSettings(error_rate=0.05, num_rounds=4, min_problems=10, max_finalists=None)
FOUR_PLACES = RacingSettings(error_rate=0.05, num_rounds=4, min_problems=10, max_finalists=4)


class Played:
    """Snapshots whose successes are known beforehand; counts the episodes that were asked for."""

    def __init__(self, solved: Mapping[str, np.ndarray], problems: Sequence[Problem] = PROBLEMS):
        self.solved, self.position = solved, {problem.id: number for number, problem in enumerate(problems)}
        self.num_episodes = 0
        self.rounds: list[Round] = []

    def __call__(self, block: Round) -> dict[str, Success]:
        self.rounds.append(block)
        self.num_episodes += len(block.snapshots) * len(block.problems)
        return {
            name: {problem.id: [bool(self.solved[name][self.position[problem.id]])] for problem in block.problems}
            for name in block.snapshots
        }


def raced(
    solved: Mapping[str, np.ndarray], rules: RacingSettings | None = RULES, *, seed: int = 0, num_problems: int = 400
) -> tuple[Race, Played]:
    played = Played(solved)
    return race(list(solved), PROBLEMS[:num_problems], played, rules, seed=seed), played


def drawn(
    rng: np.random.Generator, rates: Sequence[float], num_problems: int = 400, *, alike: float = 0.5
) -> dict[str, np.ndarray]:
    """Snapshots that succeed at these rates; share `alike` of the problems turns out the same way for all of them."""
    common, own = rng.random(num_problems), rng.random((len(rates), num_problems))
    luck = np.where(rng.random(num_problems) < alike, common, own)
    return {f"iteration-{number + 1:04d}": luck[number] < rate for number, rate in enumerate(rates)}


def test_the_problems_met_double_up_to_all():
    assert block_ends(550, RULES) == [69, 138, 275, 550]
    assert block_ends(70, RULES) == [18, 35, 70]  # 9 would be fewer than the 10 that anything is decided on
    assert block_ends(4, RULES) == [4]
    assert block_ends(550, None) == [550]


def test_a_hopeless_snapshot_is_out_after_the_first_round_and_the_winner_meets_every_problem():
    outcome, played = raced({"a": np.ones(400), "b": np.zeros(400)})
    # 50 problems gained and none lost: p = 2⁻⁵⁰.
    assert outcome.dropped == {
        "b": {"reason": "worse", "leader": "a", "behind": 1.0, "p_value": 8.88178e-16, "round": 1, "num_problems": 50}
    }
    assert [(row["num_problems"], row["snapshots"]) for row in outcome.rounds] == [(50, ["a", "b"]), (400, ["a"])]
    assert (outcome.winner, played.num_episodes) == ("a", 50 + 400)


def test_equal_snapshots_are_all_played_through_and_the_earliest_wins():
    same = np.arange(400) % 2
    outcome, played = raced({"c": same, "a": same, "b": same})
    assert (outcome.winner, outcome.dropped, played.num_episodes) == ("a", {}, 3 * 400)


def test_the_earliest_of_equals_is_told_by_its_number():
    same = np.arange(400) % 2
    outcome, _ = raced({"iteration-10000": same, "iteration-9999": same})
    assert outcome.winner == "iteration-9999"


def test_places_bound_what_equal_snapshots_cost():
    """32 alike on 400 problems: 32 × 50, then 16 × 50, 8 × 100 and 4 × 200."""
    solved = {f"s{number:02d}": np.arange(400) % 2 for number in range(32)}
    outcome, played = raced(solved, FOUR_PLACES)
    assert [len(row["snapshots"]) for row in outcome.rounds] == [32, 16, 8, 4]
    assert played.num_episodes == 1600 + 800 + 800 + 800
    assert {why["reason"] for why in outcome.dropped.values()} == {"no_place"}
    assert (outcome.winner, outcome.rounds[3]["snapshots"]) == ("s00", ["s00", "s01", "s02", "s03"])


def test_without_racing_all_meet_all_problems_in_their_own_order():
    outcome, played = raced({"a": np.zeros(400), "b": np.ones(400)}, None)
    assert [block.problems for block in played.rounds] == [PROBLEMS]
    assert (outcome.winner, outcome.dropped, played.num_episodes) == ("b", {}, 800)


def test_one_snapshot_alone_is_measured_on_everything():
    outcome, played = raced({"only": np.zeros(400)})
    assert (outcome.winner, played.num_episodes, len(outcome.rounds)) == ("only", 400, 1)


def test_the_order_in_which_snapshots_come_changes_nothing_and_the_seed_orders_the_problems():
    solved = drawn(np.random.default_rng(1), [0.3, 0.5, 0.6, 0.62])
    first, played = raced(solved, seed=5)
    again, _ = raced(dict(reversed(solved.items())), seed=5)
    assert again == first
    _, other = raced(solved, seed=6)
    assert other.rounds[0].problems != played.rounds[0].problems
    assert sorted(problem.id for block in played.rounds for problem in block.problems) == sorted(
        problem.id for problem in PROBLEMS
    )


def test_a_snapshot_whose_failures_crash_a_tool_gains_nothing_by_them():
    """Of ten problems `a` solves nine and `b` eight. The environment loses the two that b fails."""

    def play(block: Round) -> dict[str, Success]:
        episodes = {name: [episode(name, problem.id) for problem in block.problems] for name in "ab"}
        return {name: success_by_problem(played, lost_fail=True) for name, played in episodes.items()}

    def episode(name: str, problem: str) -> Trajectory:
        number = [problem.id for problem in PROBLEMS].index(problem) % 10
        is_solved = number < (9 if name == "a" else 8)
        return trajectory(problem, is_solved, outcome="environment_error" if name == "b" and not is_solved else None)

    left = success_by_problem(episode("b", problem.id) for problem in PROBLEMS)
    assert len(left) == 320
    assert all(map(all, left.values()))
    assert race(["a", "b"], PROBLEMS, play, None, seed=0).winner == "a"
    assert race(["a", "b"], PROBLEMS, play, RULES, seed=0).winner == "a"


def test_a_block_whose_every_episode_was_lost_ranks_last():
    def play(block: Round) -> dict[str, Success]:
        lost = [trajectory(problem.id, False, outcome="environment_error") for problem in block.problems]
        won = [trajectory(problem.id, True) for problem in block.problems]
        return {name: success_by_problem(lost if name == "a" else won, lost_fail=True) for name in block.snapshots}

    assert race(["a", "b"], PROBLEMS, play, RULES, seed=0).winner == "b"


@pytest.mark.slow
@pytest.mark.parametrize("alike", [0.0, 0.7])
@pytest.mark.parametrize("best", [0.5, 0.9])
def test_evidence_drops_the_truly_best_one_at_most_at_the_stated_rate(best: float, alike: float):
    """The hardest case: 15 others that are equal to it. The rate is set to 20%, so that a breach would show."""
    rng, num_trials = np.random.default_rng(0), 60
    rules = RULES.model_copy(update={"error_rate": 0.2})
    lost = 0
    for trial in range(num_trials):
        outcome, _ = raced(drawn(rng, [best] * 16, 120, alike=alike), rules, seed=trial, num_problems=120)
        lost += "iteration-0001" in outcome.dropped
    assert lost / num_trials <= 0.2


def test_what_the_rule_of_places_costs_follows_from_the_lead_and_the_luck():
    """Two snapshots and one place after 100 of 200 problems: at 50% and one sample the luck of one problem's difference
    is 2·¼·(½·½ + ½) = 0.375, so a lead of 5 points loses its place with Φ(−0.05·100/√(100·0.375)) = Φ(−0.816) = 0.207.
    """
    rules = RULES.model_copy(update={"num_rounds": 2, "max_finalists": 1})

    def chance(lead: float, **changed: Any) -> float:
        given: dict[str, Any] = {"num_snapshots": 2, "num_problems": 200, "samples": 1, "success_rate": 0.5, **changed}
        return chance_of_losing_its_place(rules, lead=lead, **given)

    assert chance(0.05) == pytest.approx(0.207, abs=0.02)
    assert chance(0.0) == pytest.approx(0.5, abs=0.03)
    assert chance(0.0, num_snapshots=8) == pytest.approx(7 / 8, abs=0.03)  # eight alike, one place
    assert chance(0.3) < 0.001
    everyone = rules.model_copy(update={"max_finalists": None})
    assert (
        chance_of_losing_its_place(everyone, lead=0.0, num_snapshots=8, num_problems=200, samples=1, success_rate=0.5)
        == 0.0
    )


@pytest.mark.slow
def test_a_snapshot_that_is_best_by_five_points_wins_though_places_are_few():
    """Of 8, one succeeds at 75% and 7 at 70%: with places for 2 it wins about as often as without any racing."""
    rng, num_trials = np.random.default_rng(0), 40
    won = dict.fromkeys(("places", "no racing"), 0)
    two_places = RULES.model_copy(update={"max_finalists": 2})
    for trial in range(num_trials):
        solved = drawn(rng, [0.75] + [0.7] * 7)
        for name, rules in (("places", two_places), ("no racing", None)):
            outcome, _ = raced(solved, rules, seed=trial)
            won[name] += outcome.winner == "iteration-0001"
    assert won["no racing"] >= 0.6 * num_trials
    assert won["places"] >= won["no racing"] - 0.1 * num_trials


def test_cost_grows_slower_than_the_number_of_snapshots():
    """A learning curve sampled ever more finely, most of it on a plateau where snapshots are alike."""
    rng = np.random.default_rng(0)
    episodes = {}
    for num_snapshots in (4, 16, 64):
        rates = 0.5 + 0.45 * (1 - np.exp(-4 * np.arange(1, num_snapshots + 1) / num_snapshots))
        outcome, played = raced(drawn(rng, list(rates), alike=0.8), FOUR_PLACES)
        episodes[num_snapshots] = played.num_episodes
        assert rates[int(outcome.winner.removeprefix("iteration-")) - 1] > 0.93
    assert episodes[16] < 3 * episodes[4] and episodes[64] < 3 * episodes[16]
    assert episodes[64] < 0.3 * 64 * 400


@pytest.mark.slow
def test_the_best_of_16_equal_snapshots_looks_better_than_it_is_and_the_gate_on_a_fresh_split_does_not_fall_for_it():
    """A champion and 16 snapshots, all with the same chances. Best-of-16 on `select` is "better" every sixth time;
    the same winner against the champion on a fresh `test` passes at most 2.5% of the time, one side of 95%.
    """
    rng, num_trials, num_problems = np.random.default_rng(0), 2000, 400
    naive = gated = 0
    for _ in range(num_trials):
        chances = rng.beta(1, 1, (2, num_problems))  # of the problems of select and of test; for all models alike
        select = rng.random((17, num_problems)) < chances[0]
        champion, snapshots = select[0], select[1:]
        best = snapshots[np.argmax(snapshots.sum(axis=1))]
        naive += is_better(best, champion)
        on_test = rng.random((2, num_problems)) < chances[1]
        gated += is_better(on_test[0], on_test[1])
    assert naive / num_trials > 0.15
    assert gated / num_trials <= 0.025 + 2 * np.sqrt(0.025 / num_trials)


def is_better(ours: np.ndarray, theirs: np.ndarray) -> bool:
    differences = ours.astype(float) - theirs.astype(float)
    return paired_interval(differences.tolist(), range(len(differences)), confidence=0.95)[0] > 0
