"""How small a gain can a comparison see? Said before the run, so that nobody waits for an answer it cannot give.

One formula over the problems and samples at hand, for the paired interval of `intervals.py`. Its assumptions are below,
in the open: what they stand for is only known once both policies have been measured.
"""

from __future__ import annotations

import math

# Of the variance p(1−p) of one episode's success: the share that lies between problems, the rest being luck of the
# draw, and how much of that share both policies have in common (at 1.0 what is hard for one is as hard for the other).
SHARE_BETWEEN_PROBLEMS = 0.5
SHARED_DIFFICULTY = 0.5


def minimum_detectable_difference(
    *,
    num_problems: int,
    samples_per_problem: int,
    confidence: float,
    power: float,
    success_rate: float = 0.5,
    share_between_problems: float = SHARE_BETWEEN_PROBLEMS,
    shared_difficulty: float = SHARED_DIFFICULTY,
) -> float:
    """The true difference of success that a paired comparison of two policies finds with probability `power`.

    Found means that the paired interval at `confidence` excludes 0. A per-problem difference of means varies as
    2·p(1−p)·(b·(1−c) + (1−b)/k): b lies between problems, c of it is shared by both policies and cancels in the pair,
    and k samples average the rest. `success_rate` p = ½ is the worst case. 1.0 where no difference is that large.
    """
    from scipy.special import stdtrit

    if min(num_problems, samples_per_problem) < 1:
        raise ValueError(
            f"{num_problems} problems with {samples_per_problem} samples each measure nothing, so no difference could "
            f"be found. Give at least one of both."
        )
    between = share_between_problems * (1 - shared_difficulty)
    variance = 2 * success_rate * (1 - success_rate) * (between + (1 - share_between_problems) / samples_per_problem)
    total = num_problems + 2  # with the two made-up problems of the paired interval
    standard_error = math.sqrt((num_problems * variance + 1) / total / total)
    quantiles = float(stdtrit(total - 1, 0.5 + confidence / 2) + stdtrit(total - 1, power))
    return min(1.0, quantiles * standard_error * total / num_problems)
