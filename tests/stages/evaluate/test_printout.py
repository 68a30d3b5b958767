"""What `evaluate` says of a run that went wrong."""

from __future__ import annotations

from typing import Any

from tasks.stages.evaluate.printout import diagnose


def result(**rates: float) -> dict[str, Any]:
    by_category = {name: {"success_rate": rate} for name, rate in rates.items()}
    return {"success_rate": sum(rates.values()) / len(rates), "by_category": by_category}


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
