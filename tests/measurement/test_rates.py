"""Every rate that promotion states, on a fifth of the trials of `make bench`: whether it is what it is said to be."""

from __future__ import annotations

import pytest

from tests.simulations.rates import Rate, all_rates, measure

SHARE = 0.2


@pytest.mark.slow
@pytest.mark.parametrize("rate", all_rates(), ids=lambda rate: rate.name)
def test_a_rate_is_as_stated(rate: Rate) -> None:
    measured = measure(rate, share=SHARE)
    assert measured.holds, f"{rate.claim}: {measured.text()}, stated {rate.stated_text()}"
