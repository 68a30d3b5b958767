"""Which problems are drawn: weighted by failure, or each once an epoch."""

from __future__ import annotations

from collections import Counter

import pytest

from tasks.core.records import Group
from tasks.learning.grpo.curriculum import ProblemSampler
from tests import tiny
from tests.learning.options import grpo
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


@pytest.mark.parametrize("kind", ["adaptive", "uniform"])
def test_an_iteration_draws_no_problem_twice_not_even_as_a_replacement(kind: str) -> None:
    sampler = ProblemSampler(tiny.problems(60), grpo(problem_sampler=kind), seed=3)
    for iteration in range(1, 6):
        drawn = [p.id for round_number in range(3) for p in sampler.draw(iteration, round_number, 16)]
        assert len(set(drawn)) == 48


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
