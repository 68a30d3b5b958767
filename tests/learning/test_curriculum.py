"""Which problems are drawn: weighted by failure, or each once an epoch."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.core.records import Group, Problem
from tasks.learning.grpo.curriculum import ProblemSampler
from tasks.learning.grpo.solve_rates import Played
from tests import tiny
from tests.learning.options import NO_EXPLORATION, grpo
from tests.learning.rows import a_group


def test_the_adaptive_sampler_turns_to_what_fails() -> None:
    """After a category is always solved and another never, draws go to the second about 11 times as often."""
    problems = [p for p in tiny.problems(200) if p.category in ("cancel/none", "book/declined")]
    sampler = ProblemSampler(problems, grpo(adaptive_update_rate=1.0), seed=0)
    solved = a_group(1, [1.0] * 4, ["success"] * 4)
    failed = a_group(2, [0.0] * 4, ["failure"] * 4)
    sampler.learn([Group("a", "cancel/none", solved.trajectories, solved.scores)])
    sampler.learn([Group("b", "book/declined", failed.trajectories, failed.scores)])
    drawn = [p.category for i in range(100) for p in sampler.draw(i, 0, 8)]
    assert sampler.success == {"book/declined": 0.0, "cancel/none": 1.0}
    assert 0.82 < drawn.count("book/declined") / len(drawn) < 0.95


def test_an_adaptive_draw_depends_on_the_iteration_alone() -> None:
    sampler = ProblemSampler(tiny.problems(60), grpo(), seed=3)
    assert sampler.draw(5, 0, 20) == sampler.draw(5, 0, 20)
    assert sampler.draw(5, 0, 20) != sampler.draw(6, 0, 20)


@pytest.mark.parametrize("kind", ["adaptive", "uniform", "band"])
def test_an_iteration_draws_no_problem_twice_not_even_as_a_replacement(kind: str) -> None:
    sampler = ProblemSampler(tiny.problems(60), grpo(problem_sampler=kind), seed=3)
    for iteration in range(1, 6):
        drawn = [p.id for round_number in range(3) for p in sampler.draw(iteration, round_number, 16)]
        assert len(set(drawn)) == 48


def test_a_solved_category_is_drawn_at_once_where_no_other_has_problems_left() -> None:
    """With next to no floor its turn would come after a hundred million draws that find nothing new."""
    problems = tiny.problems(60)
    sampler = ProblemSampler(problems, grpo(adaptive_update_rate=1.0, adaptive_floor=1e-8), seed=0)
    solved = a_group(1, [1.0] * 4, ["success"] * 4)
    sampler.learn([Group("a", problems[0].category, solved.trajectories, solved.scores)])
    drawn = [problem.id for round_number in range(2) for problem in sampler.draw(1, round_number, 30)]
    assert sorted(drawn) == sorted(problem.id for problem in problems)


def test_a_draw_larger_than_the_problems_gives_each_once() -> None:
    assert len(ProblemSampler(tiny.problems(11), grpo(), seed=3).draw(1, 0, 16)) == 11


def test_uniform_sees_every_problem_once_an_epoch() -> None:
    """60 problems in draws of 16: after 15 draws, 240 in all, each was seen exactly four times."""
    sampler = ProblemSampler(tiny.problems(60), grpo(problem_sampler="uniform"), seed=3)
    seen = Counter(p.id for iteration in range(15) for p in sampler.draw(iteration, 0, 16))
    assert set(seen.values()) == {4}


def test_a_sampler_put_back_skips_no_problem_and_repeats_none() -> None:
    problems, options = tiny.problems(60), grpo(problem_sampler="uniform")
    whole, first, second = (ProblemSampler(problems, options, seed=3) for _ in range(3))
    expected = [whole.draw(iteration, 0, 16) for iteration in range(8)]
    drawn = [first.draw(iteration, 0, 16) for iteration in range(5)]
    second.load_state(first.state())
    drawn += [second.draw(iteration, 0, 16) for iteration in range(5, 8)]
    assert drawn == expected


def band_sampler(problems: list[Problem], *, baseline: list[Played] | None = None, **band: Any) -> ProblemSampler:
    options = grpo(problem_sampler="band", group_size=8, band={**grpo().band.model_dump(), **band})
    return ProblemSampler(problems, options, seed=3, baseline=baseline or [])


def result(problem: Problem, num_solved: int, size: int = 8) -> Group:
    outcomes = ["success"] * num_solved + ["failure"] * (size - num_solved)
    group = a_group(1, [float(outcome == "success") for outcome in outcomes], outcomes)
    return Group(problem.id, problem.category, group.trajectories, group.scores)


def test_the_band_draws_what_is_solved_sometimes_and_starves_nothing() -> None:
    """Of 11 categories one is always solved, one never, one half; the others are never. A tenth of the draws is over
    all, so each of 220 problems has at least 0.1/220.
    """
    problems = tiny.problems(220)
    solved = {"cancel/none": 200, "quote/none": 100}
    known = {problem.category: problem for problem in problems}
    baseline = [Played(known[name], solved.get(name, 0), 200) for name in known]
    sampler = band_sampler(problems, baseline=baseline, half_life=None)
    weights = sampler.weights()
    assert sum(weights.values()) == pytest.approx(1)
    assert min(weights.values()) >= 0.1 / 220
    of = {name: sum(weights[p.id] for p in problems if p.category == name) for name in known}
    assert of["quote/none"] > 0.6
    assert of["cancel/none"] < 0.1
    drawn = [p.category for i in range(60) for p in sampler.draw(i, 0, 4)]
    assert drawn.count("quote/none") / len(drawn) == pytest.approx(of["quote/none"], abs=0.12)


def test_a_problem_leaves_the_band_as_training_solves_it() -> None:
    problems = tiny.problems(22)
    sampler = band_sampler(problems)
    before = sampler.weights()[problems[0].id]
    for _ in range(6):
        sampler.learn([result(problems[0], 8)])
    assert sampler.weights()[problems[0].id] < before / 3


def test_the_next_level_opens_when_the_present_one_is_solved_surely_enough() -> None:
    """Level 1 is drawn but for the uniform tenth; level 2 opens once 1 is solved, and level 3 stays closed."""
    problems = tiny.problems(110)
    sampler = band_sampler(problems, levels={"by": "level", "open_at": 0.6, "confidence": 0.9})
    first = sampler.draw(1, 0, 8)
    assert sampler.metrics()["open_level"] == 1
    assert sum(problem.level == 1 for problem in first) >= 6
    sampler.learn([result(problem, 8) for problem in problems if problem.level == 1])
    sampler.draw(2, 0, 8)
    assert sampler.metrics()["open_level"] == 2
    sampler.learn([result(problem, 0) for problem in problems if problem.level == 1])
    sampler.draw(3, 0, 8)
    assert sampler.metrics()["open_level"] == 2  # once open, it stays open


@pytest.mark.slow
def test_measured_and_expected_signal_agree_while_the_policy_stays() -> None:
    """200 iterations of 8 of 330 problems, each with a rate of its own around that of its category."""
    problems, rng = tiny.problems(330), random.Random(5)
    centre = {name: rng.random() for name in {problem.category for problem in problems}}
    chance = {
        p.id: rng.betavariate(4 * centre[p.category] + 0.01, 4 * (1 - centre[p.category]) + 0.01) for p in problems
    }
    sampler = band_sampler(problems, half_life=None)
    expected, measured = [], []
    for iteration in range(1, 201):
        groups = []
        for problem in sampler.draw(iteration, 0, 8):
            num_solved = sum(rng.random() < chance[problem.id] for _ in range(8))
            groups.append(result(problem, num_solved))
            measured.append(0 < num_solved < 8)
        expected.append(sampler.metrics()["expected_informative_share"])
        sampler.learn(groups)
    # 1,600 groups: the standard error is about 1 point, and the prior's strength is not exactly the truth's.
    assert sum(measured) / len(measured) == pytest.approx(sum(expected) / len(expected), abs=0.05)


def test_the_expected_signal_is_of_the_samples_that_are_scheduled() -> None:
    """Nothing is known, so every problem is Beta(2, 2): of 4 samples 1 − 2·(2·3·4·5)/(4·5·6·7) = 5/7 have signal."""
    points = [{"iteration": 1, "value": 4}, {"iteration": 2, "value": 16}]
    exploration = {**NO_EXPLORATION, "samples_per_problem": points}
    options = grpo(problem_sampler="band", group_size=16, exploration=exploration)
    sampler = ProblemSampler(tiny.problems(33), options, seed=3)
    shares = []
    for iteration in (1, 2):
        sampler.draw(iteration, 0, 8)
        shares.append(sampler.metrics()["expected_informative_share"])
    assert shares[0] == pytest.approx(5 / 7)
    assert shares[1] > 0.9


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.integers(0, 2**16), st.booleans())
def test_a_band_sampler_put_back_from_a_checkpoint_draws_the_same(stop: int, seed: int, has_levels: bool) -> None:
    problems, rng = tiny.problems(44), random.Random(seed)
    levels = {"by": "calls", "open_at": 0.5, "confidence": 0.7} if has_levels else None
    results = [[rng.randint(0, 8) for _ in range(6)] for _ in range(6)]

    def play(sampler: ProblemSampler, iterations: range) -> list[list[str]]:
        drawn = []
        for iteration in iterations:
            chosen = sampler.draw(iteration, 0, 6)
            sampler.learn([result(p, n) for p, n in zip(chosen, results[iteration], strict=True)])
            drawn.append([problem.id for problem in chosen])
        return drawn

    whole, first, second = (band_sampler(problems, levels=levels) for _ in range(3))
    expected = play(whole, range(6))
    drawn = play(first, range(stop))
    second.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert drawn + play(second, range(stop, 6)) == expected
    assert second.state() == whole.state()


def test_a_band_without_width_is_refused_with_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"low is 0.9 and high 0.1, .*Set train.band.low below train.band.high"):
        band_sampler(tiny.problems(11), low=0.9, high=0.1)
