"""Exact p-values of paired comparisons, with the split group as the unit.

Under the null hypothesis every sign of a group's difference is as likely as its opposite. Differences have few distinct
sizes: signs within one size are binomial, and their sum is a short convolution, so the test is exact. Only where the
grid is too fine, signs are drawn from a fixed seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

FINEST_GRID = 100_000  # points of the null distribution that are still summed exactly
MOST_PRODUCTS = 1_000_000  # of two distributions that are convolved term by term, in a millisecond
NUM_RESAMPLES, RESAMPLING_SEED = 99_999, 0  # so that 0.001% can be reached


class PValues(NamedTuple):
    two_sided: float
    greater: float


def sign_flip_p_values(differences: Sequence[int]) -> PValues:
    """Chance of a sum at least as far from 0 (or as high) if each sign were a coin's; 1 where nothing differs.

    `differences` are whole numbers, so that ties are exact. With one problem per group and one sample per problem this
    is McNemar's exact test. Source: Fisher's randomisation of signs; Good, Permutation, Parametric and Bootstrap Tests
    of Hypotheses, 3rd ed.
    """
    unit = math.gcd(*differences)
    if unit == 0:
        return PValues(1.0, 1.0)
    steps = [difference // unit for difference in differences if difference]
    largest, total = sum(map(abs, steps)), sum(steps)
    if largest > FINEST_GRID:
        return _by_resampling(steps)
    chances = _sum_of_random_signs(steps)

    def at_least(threshold: int) -> float:
        return float(chances[(threshold + largest) // 2 :].sum())  # index i is the sum 2i − Σ|step|

    return PValues(min(1.0, 2 * at_least(abs(total))), min(1.0, at_least(total)))


def smallest_p_value(num_groups: int) -> float:
    """The smallest one-sided p-value of so many groups, where all gain: 2⁻ⁿ. A level below it is never reached."""
    return 0.5**num_groups


def mcnemar_p_value(num_gained: int, num_lost: int) -> float:
    """The two-sided binomial test of discordant pairs: McNemar 1947 (doi:10.1007/BF02295996)."""
    from scipy.special import bdtr  # scipy.stats takes 0.6 s to import

    return min(1.0, 2 * float(bdtr(min(num_gained, num_lost), num_gained + num_lost, 0.5)))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values by Holm 1979 (Scand. J. Statist. 6): the i-th smallest of m times m − i + 1, made monotone, at
    most 1.
    """
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def possible_p_values(differences: Sequence[int], *, above: float = 0.0) -> list[float]:
    """Every one-sided p-value, ascending, that `sign_flip_p_values` could give with other signs of the same differences
    and a mean greater than `above`, in their unit; six significant digits. Where the null distribution is drawn and not
    summed, any p-value is possible: 0.001, 0.002 and so on represent them.
    """
    unit = math.gcd(*differences)
    steps = [difference // unit for difference in differences if difference] if unit else []
    most = sum(map(abs, steps))
    if most > FINEST_GRID:
        return [number / 1_000 for number in range(1, 1_001)]
    least = math.floor(above * len(differences) / unit) if unit else 0
    tails = _sum_of_random_signs(steps)[::-1].cumsum()  # tails[i]: the sum is at least most − 2i
    return [float(f"{tail:.6g}") for place, tail in enumerate(tails) if most - 2 * place > least and tail < 0.5]


def family_level(possible: Sequence[Sequence[float]], error: float) -> float:
    """The level at which the chance of any false alarm among several discrete tests is at most `error`: the largest c
    for which the chances P(pᵢ ≤ c) add up to no more. Each is the largest p-value ≤ c that the test can give.

    A test that cannot raise an alarm uses no share of the error. The bound holds for any dependence between tests and
    is never below Bonferroni's error / m. Source: Westfall and Wolfinger 1997, Multiple tests with discrete
    distributions, The American Statistician 51, after Tarone 1990 (doi:10.2307/2531456).
    """
    level = error / max(1, len(possible))
    reached: dict[float, list[int]] = {}
    for number, values in enumerate(possible):
        for p in values:
            reached.setdefault(p, []).append(number)
    taken = [0.0] * len(possible)
    for p in sorted(reached):
        for number in reached[p]:
            taken[number] = p
        if math.fsum(taken) > error:
            break
        level = max(level, p)
    return level


def _sum_of_random_signs(steps: Sequence[int]) -> np.ndarray[Any, Any]:
    """Distribution of Σ ±step, from −Σ|step| up in strides of 2."""
    import numpy as np
    from scipy.special import gammaln

    parts = [np.ones(1)]
    for size, count in sorted(Counter(map(abs, steps)).items()):
        heads = np.arange(count + 1)
        of_this_size = np.zeros(size * count + 1)
        of_this_size[::size] = np.exp(
            gammaln(count + 1) - gammaln(heads + 1) - gammaln(count - heads + 1) - count * math.log(2)
        )
        parts.append(of_this_size)
    while len(parts) > 1:  # in pairs, so that few are long
        parts = [_convolve(*pair) for pair in zip_longest(parts[::2], parts[1::2], fillvalue=np.ones(1))]
    return np.maximum(parts[0], 0.0)  # long ones have errors of 1e-16


def _convolve(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Long ones by FFT. As scipy.signal has it, which takes a second to import."""
    import numpy as np

    if len(one) * len(other) <= MOST_PRODUCTS:
        return np.convolve(one, other)
    length = len(one) + len(other) - 1
    return np.fft.irfft(np.fft.rfft(one, length) * np.fft.rfft(other, length), length)


def _by_resampling(steps: Sequence[int]) -> PValues:
    """Both p-values from drawn signs. The observed ones count too, which keeps the test valid: Phipson and Smyth 2010
    (doi:10.2202/1544-6115.1585).
    """
    import numpy as np

    rng, values, total = np.random.default_rng(RESAMPLING_SEED), np.array(steps, dtype=np.int64), sum(steps)
    most, batch = int(np.abs(values).sum()), max(1, 1_000_000 // len(steps))
    num_as_far = num_as_high = 1
    for start in range(0, NUM_RESAMPLES, batch):
        num_drawn = min(batch, NUM_RESAMPLES - start)
        heads = rng.integers(0, 2, size=(num_drawn, len(steps)), dtype=np.int8)
        sums = 2 * (heads @ np.abs(values)) - most
        num_as_far += int((np.abs(sums) >= abs(total)).sum())
        num_as_high += int((sums >= total).sum())
    return PValues(num_as_far / (NUM_RESAMPLES + 1), num_as_high / (NUM_RESAMPLES + 1))
