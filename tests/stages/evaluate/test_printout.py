"""What `evaluate` says of what it will play, and of a run that went wrong."""

from __future__ import annotations

from typing import Any

from tasks.core.settings import load, read_params
from tasks.stages.evaluate.printout import describe_plan, diagnose
from tasks.stages.evaluate.racing import race
from tasks.stages.evaluate.settings import EvaluateSections
from tests import tiny
from tests.conftest import ROOT


def result(**rates: float) -> dict[str, Any]:
    by_category = {name: {"success_rate": rate} for name, rate in rates.items()}
    return {"success_rate": sum(rates.values()) / len(rates), "by_category": by_category}


def test_the_plan_is_what_the_race_plays() -> None:
    """Eleven snapshots meet ever more problems; one alone plays all 550 in its first round."""
    settings, problems = load(EvaluateSections, read_params(ROOT / "params.yaml")).evaluate, tiny.problems(550)

    def plan(num_snapshots: int) -> str:
        return describe_plan(settings, num_snapshots, len(problems), problems[:20]).splitlines()[0]

    assert plan(11) == "select: 11 snapshots on 69 → 138 → 275 → 550 problems × 1"
    assert plan(1) == "select: 1 snapshot on 550 problems × 1"
    one_problem = describe_plan(settings, 1, len(problems), problems[:1])
    assert f"test: 1 problem of 1 group × {settings.test_samples_per_problem};" in one_problem
    alone = race(["a"], problems, lambda block: {"a": {p.id: [True] for p in block.problems}}, settings.racing, seed=1)
    assert [played["num_problems"] for played in alone.rounds] == [550]


def test_training_that_made_it_worse_is_said_with_the_categories_that_lost_most() -> None:
    test = {"warm_start": result(lend=0.6, fine=0.6, renew=0.3), "best": result(lend=0.5, fine=0.1, renew=0.4)}
    (sentence,) = diagnose(test, {"ci_low": -0.25, "ci_high": -0.02})
    assert "the best snapshot solves 33.3%, the warm start 50.0% (-25.0 to -2.0 points)" in sentence
    assert "Most was lost in fine (60.0% → 10.0%), lend (60.0% → 50.0%). " in sentence
    assert diagnose(test, {"ci_low": -0.25, "ci_high": 0.02}) == []  # no evidence


def test_categories_in_which_nothing_succeeds_are_named() -> None:
    best = result(a=0.0, b=0.0, c=0.5, d=0.0, e=0.0)
    (sentence,) = diagnose({"warm_start": best, "best": best}, {"ci_low": -0.1, "ci_high": 0.1})
    assert "never succeeds in a, b, d and 1 more." in sentence
