"""Agreement of two raters on yes and no: raw, with an interval clustered by group, and corrected for chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from tasks.measurement.intervals import clustered_interval


def cohens_kappa(first: Sequence[bool], second: Sequence[bool]) -> float:
    """κ = (p_o − p_e) / (1 − p_e): agreement beyond what the raters' own shares of yes give by chance.

    1 is full agreement, 0 is chance. Where both gave one and the same answer to everything, chance explains it all and
    κ is 0/0: 0 is returned, since nothing was shown. Source: Cohen 1960, doi:10.1177/001316446002000104.
    """
    number = len(first)
    observed = sum(one == other for one, other in zip(first, second, strict=True)) / number
    yes_first, yes_second = sum(first) / number, sum(second) / number
    expected = yes_first * yes_second + (1 - yes_first) * (1 - yes_second)
    return (observed - expected) / (1 - expected) if expected < 1 else 0.0


def agreement_interval(
    first: Sequence[bool], second: Sequence[bool], groups: Sequence[Hashable], *, confidence: float
) -> tuple[float, float]:
    """Of the share of equal answers; one entry per episode, `groups` those that depend on the same problem."""
    equal = [float(one == other) for one, other in zip(first, second, strict=True)]
    return clustered_interval(equal, groups, confidence=confidence)


def confusion(first: Sequence[bool], second: Sequence[bool]) -> dict[tuple[bool, bool], int]:
    """How often each pair of answers was given."""
    counted = Counter(zip(first, second, strict=True))
    return {(one, other): counted[one, other] for one in (True, False) for other in (True, False)}
