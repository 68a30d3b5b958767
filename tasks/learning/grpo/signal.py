"""How many groups will teach nothing, before they are played: all their episodes succeed, or all fail.

With a solve rate p that is Beta(a, b), a group of G teaches nothing with E[p^G + (1 − p)^G], which is
∏ (a + i)/(a + b + i) + ∏ (b + i)/(a + b + i) over i < G (the Beta-binomial's two ends). For Beta(1, 1) and G = 4 it is
1/5 + 1/5. Rewards with further parts may differ in groups that this counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tasks.learning.grpo.solve_rates import Beta

GROUP_SIZES = (4, 8, 16, 32)
WORTH_DOUBLING = 1.1  # times the episodes in groups with signal; the price of doubling is half the problems


@dataclass(frozen=True, slots=True)
class ExpectedSignal:
    """Expected shares of groups without signal by group size, for episodes drawn as the sampler would draw now."""

    without_signal: Mapping[int, float]

    @property
    def recommended(self) -> int:
        """The smallest size whose double brings less than `WORTH_DOUBLING` times the episodes with signal.

        At the same number of episodes a share 1 − s of them is in groups with signal. The episodes per such group,
        G / (1 − s), are fewest with the smallest G almost always, so they choose nothing.
        """
        for size in GROUP_SIZES[:-1]:
            if 1 - self.without_signal[2 * size] < WORTH_DOUBLING * (1 - self.without_signal[size]):
                return size
        return GROUP_SIZES[-1]

    def episodes_per_useful_group(self, size: int) -> float | None:
        """None where no group is expected to have signal."""
        useful = 1 - self.without_signal[size]
        return size / useful if useful > 0 else None

    def num_episodes(
        self, size: int, *, num_iterations: int, problems_per_iteration: int, replacement_rounds: int
    ) -> float:
        """Of a run: each round of dynamic sampling plays the groups again that the round before left without signal."""
        share = self.without_signal[size]
        rounds = sum(share**number for number in range(replacement_rounds + 1))
        return num_iterations * problems_per_iteration * size * rounds


def share_without_signal(rate: Beta, group_size: int) -> float:
    total = rate.solved + rate.failed
    all_solved = prod((rate.solved + number) / (total + number) for number in range(group_size))
    all_failed = prod((rate.failed + number) / (total + number) for number in range(group_size))
    return min(1.0, all_solved + all_failed)  # which rounding may exceed


def expected_signal(rates: Sequence[Beta], weights: Sequence[float], *, group_sizes: Iterable[int]) -> ExpectedSignal:
    """For problems with these posteriors, drawn with these weights; `group_sizes` are added to the usual ones."""
    total = sum(weights)
    return ExpectedSignal(
        {
            size: sum(
                weight * share_without_signal(rate, size) for rate, weight in zip(rates, weights, strict=True) if weight
            )
            / total
            for size in sorted({*GROUP_SIZES, *group_sizes})
        }
    )
