"""Every rate that promotion states, on a fifth of the trials of `make bench`: whether it is what it is said to be.

`pytest -s` prints the CPU seconds of each; all of them together take about a minute of one core.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.simulations.rates import Measured, Rate, all_rates, measure, num_trials_of

SHARE = 0.2
# Rates that turnwise once had, as the issue reported them or commit 7601ae5 measured: by a part of the claim.
ONCE = [
    ("a year of nights makes a champion that is no better", 0.23),
    ("a year of cheaper challengers, worse by the whole margin", 0.23),
    ("covers it", 0.89),
    ("passes as smaller, at 2.5%", 0.067),
    ("is found better, at 2.5%", 0.067),
    ("is found better, at 0.03%", 0.0094),
    ("compare calls any of 11 categories", 0.22),
    ("98 → 88% in a category", 0.39),
    ("whose failures are lost passes", 0.81),
    ("a year of cheaper champions ends", 1.0),
    ("a year of cheaper and better champions in turn ends", 0.83),
    ("racing drops the best of 16", 0.089),
]


@pytest.mark.slow
@pytest.mark.parametrize("rate", all_rates(), ids=lambda rate: rate.name)
def test_a_rate_is_as_stated(rate: Rate) -> None:
    measured = measure(rate, share=SHARE)
    print(f"{measured.cpu_seconds:.1f} s of CPU: {rate.claim}")
    limit = rate.limit_text(measured.num_trials)
    assert measured.holds, f"{rate.claim}: {measured.text()}, stated {rate.stated_text()}, accepted {limit}"


@pytest.mark.parametrize(("claim", "once"), ONCE)
def test_a_rate_of_before_would_be_refused(claim: str, once: float) -> None:
    """On the fifth that this file runs, and all but surely."""
    rates = [rate for rate in all_rates() if claim in rate.claim]
    assert rates
    for rate in rates:
        num_trials = num_trials_of(rate, SHARE)
        assert not Measured(rate, round(once * num_trials), num_trials).holds, rate.claim
        assert rate.chance_to_hold(once, num_trials) < 0.01, rate.claim
        bad = replace(rate, simulate=lambda num, seed: np.random.default_rng(seed).random(num) < once)
        assert not measure(bad, share=SHARE).holds, rate.claim


@pytest.mark.slow
@pytest.mark.parametrize("rate", all_rates(), ids=lambda rate: rate.name)
def test_a_rate_at_its_bound_is_accepted_and_some_rate_is_not(rate: Rate) -> None:
    for num_trials in (num_trials_of(rate, SHARE), rate.num_trials):
        assert rate.chance_to_hold(rate.strictest, num_trials) >= 0.995
        assert rate.chance_to_hold(float(rate.bound == "most"), num_trials) == 0
