"""What intervals and tests promise where problems of one split group are alike: coverage, and rates at a null.

Near 0 and 100%, with few discordant pairs, many samples per problem, groups of unequal size and few groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tasks.measurement.intervals import clustered_interval, difference_p_value, paired_interval
from tasks.measurement.significance import sign_flip_p_values
from tests.simulations.rates import Rate

Floats = np.ndarray[Any, np.dtype[np.float64]]
LEVEL, SMALL_LEVEL = 0.025, 0.0003  # one side of 95%; about what one of a year's decisions may spend


@dataclass(frozen=True, slots=True)
class Case:
    """Problems and two policies on them, the first worse by `loss`.

    Two problems of a group correlate by `alike_in_group`, two samples of a problem by `alike_in_problem` more; a share
    `common` of groups and problems is as hard for one policy as for the other. `lost_groups` is the part of `loss` that
    comes as whole groups lost.
    """

    sizes: tuple[int, ...]
    success: float
    samples: int = 1
    alike_in_group: float = 0.0
    alike_in_problem: float = 0.3
    common: float = 0.5
    loss: float = 0.0
    lost_groups: float = 0.0

    @property
    def labels(self) -> list[int]:
        return [group for group, size in enumerate(self.sizes) for _ in range(size)]

    def draw(self, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Mean success on each problem: ours, theirs."""
        labels, num_groups, num = np.array(self.labels), len(self.sizes), sum(self.sizes)
        first = alike(rng, np.full(num_groups, self.success), self.alike_in_group)
        second = alike(rng, np.full(num_groups, self.success), self.alike_in_group)
        is_common = rng.random(num_groups) < self.common
        theirs = alike(rng, first[labels], self.alike_in_problem)
        ours = alike(rng, np.where(is_common, first, second)[labels], self.alike_in_problem)
        ours = np.where(is_common[labels] & (rng.random(num) < self.common), theirs, ours)
        share = self.loss / self.success
        whole = share * self.lost_groups
        ours = ours * (1 - (share - whole) / (1 - whole)) * (rng.random(num_groups) >= whole)[labels]
        return rng.binomial(self.samples, ours) / self.samples, rng.binomial(self.samples, theirs) / self.samples


def alike(rng: np.random.Generator, means: Floats, likeness: float) -> Floats:
    """Chances of these means, betas: draws of one chance correlate by `likeness`."""
    if likeness == 0:
        return means
    strength = 1 / likeness - 1
    means = np.clip(means, 1e-9, 1 - 1e-9)
    return rng.beta(means * strength, (1 - means) * strength)


def simulate_coverage_of_a_rate(num_trials: int, seed: int, *, case: Case) -> list[float]:
    rng, labels = np.random.default_rng(seed), case.labels
    num_episodes = case.samples * len(labels)
    found = []
    for _ in range(num_trials):
        low, high = clustered_interval(case.draw(rng)[1].tolist(), labels, confidence=0.95, num_episodes=num_episodes)
        found.append(float(low <= case.success <= high))
    return found


def simulate_coverage_of_a_difference(num_trials: int, seed: int, *, case: Case) -> list[float]:
    rng, labels = np.random.default_rng(seed), case.labels
    found = []
    for _ in range(num_trials):
        ours, theirs = case.draw(rng)
        low, high = paired_interval((ours - theirs).tolist(), labels, confidence=0.95)
        found.append(float(low <= -case.loss <= high))
    return found


def simulate_non_inferiority_at_the_margin(num_trials: int, seed: int, *, case: Case, level: float) -> list[float]:
    """How often a loss of exactly the margin passes as a smaller one."""
    rng, labels = np.random.default_rng(seed), case.labels
    found = []
    for _ in range(num_trials):
        ours, theirs = case.draw(rng)
        found.append(float(difference_p_value((ours - theirs).tolist(), labels, above=-case.loss) <= level))
    return found


def simulate_equal_found_better(num_trials: int, seed: int, *, case: Case, level: float) -> list[float]:
    """How often the sign-flip test says that one of two equal policies, which differ by group, is better."""
    rng, labels = np.random.default_rng(seed), case.labels
    found = []
    for _ in range(num_trials):
        ours, theirs = case.draw(rng)
        steps = np.rint((ours - theirs) * case.samples)
        sums = np.bincount(labels, steps).astype(int).tolist()
        found.append(float(sign_flip_p_values(sums).greater <= level))
    return found


def uneven(num_groups: int) -> tuple[int, ...]:
    """Sizes of a long tail: of 100 groups the largest has 32 problems, the median 3."""
    return tuple(
        np.maximum(1, np.round(np.exp(np.random.default_rng(5).normal(1, 1, num_groups)))).astype(int).tolist()
    )


ALONE_100, ALONE_300, ALONE_550 = (1,) * 100, (1,) * 300, (1,) * 550
FIVES_110, FIVES_640, TWENTIES_20, UNEVEN_100 = (5,) * 110, (5,) * 640, (20,) * 20, uneven(100)

OF_A_RATE = [
    ("550 problems at 99.5%", Case(ALONE_550, 0.995), 0.9403),
    ("100 problems at 2%, 8 samples", Case(ALONE_100, 0.02, samples=8), 0.919),
    (
        "300 problems at 99.5%, 8 samples, correlation 0.6",
        Case(ALONE_300, 0.995, samples=8, alike_in_problem=0.6),
        0.8317,
    ),
    ("110 groups of 5 at 80%, correlation 0.5", Case(FIVES_110, 0.8, alike_in_group=0.5), 0.7237),
    ("100 uneven groups at 98%, correlation 0.5", Case(UNEVEN_100, 0.98, samples=2, alike_in_group=0.5), 0.6533),
    ("20 groups of 20 at 50%, correlation 0.2", Case(TWENTIES_20, 0.5, alike_in_group=0.2), 0.6153),
]
OF_A_DIFFERENCE = [
    ("100 problems at 99%", Case(ALONE_100, 0.99, loss=0.02), 0.9507),
    ("550 problems at 95%, few differ", Case(ALONE_550, 0.95, common=0.9, loss=0.02), 0.9523),
    ("100 problems at 95%, 8 samples", Case(ALONE_100, 0.95, samples=8, loss=0.02), 0.979),
    ("110 groups of 5 at 80%, 4 samples, correlation 0.5", Case(FIVES_110, 0.8, samples=4, alike_in_group=0.5), 0.7293),
    ("640 groups of 5 at 95%, correlation 0.5", Case(FIVES_640, 0.95, alike_in_group=0.5, loss=0.02), 0.8287),
    ("100 uneven groups at 95%, 2 samples, correlation 0.2",
     Case(UNEVEN_100, 0.95, samples=2, alike_in_group=0.2, loss=0.02), 0.8567),
    ("20 groups of 20 at 95%, correlation 0.2", Case(TWENTIES_20, 0.95, alike_in_group=0.2), 0.7353),
    ("20 groups of 20 at 50%, correlation 0.5", Case(TWENTIES_20, 0.5, alike_in_group=0.5), 0.5153),
    ("100 uneven groups at 99%, 4 samples, half the loss as whole groups",
     Case(UNEVEN_100, 0.99, samples=4, loss=0.02, lost_groups=0.5), 0.77),
]  # fmt: skip
AT_THE_MARGIN = [
    ("100 problems, 5 points", Case(ALONE_100, 0.95, loss=0.05), 5000, 0.0253),
    ("550 problems, 2 points, 8 samples", Case(ALONE_550, 0.95, samples=8, loss=0.02), 5000, 0.0232),
    ("110 groups of 5, 2 points, correlation 0.3", Case(FIVES_110, 0.95, alike_in_group=0.3, loss=0.02), 5000, 0.0565),
    ("1,100 groups of 5, 2 points, 4 samples, correlation 0.3",
     Case((5,) * 1100, 0.95, samples=4, alike_in_group=0.3, loss=0.02), 4000, 0.0905),
]  # fmt: skip
BY_GROUP = Case(FIVES_110, 0.9, samples=2, alike_in_group=0.2, common=0.0)

RATES = (
    *(
        Rate(f"95% interval of a success rate covers it: {name}",
             partial(simulate_coverage_of_a_rate, case=case), 6000, 0.94, "least", before)
        for name, case, before in OF_A_RATE
    ),
    *(
        Rate(f"95% interval of a difference covers it: {name}",
             partial(simulate_coverage_of_a_difference, case=case),
             5000 if len(case.labels) > 3000 else 6000, 0.94, "least", before)
        for name, case, before in OF_A_DIFFERENCE
    ),
    *(
        Rate(f"a loss of the margin passes as smaller, at 2.5%: {name}",
             partial(simulate_non_inferiority_at_the_margin, case=case, level=LEVEL), trials, LEVEL, "most", before)
        for name, case, trials, before in AT_THE_MARGIN
    ),
    Rate("a loss of the margin passes as smaller, at 0.03%: 550 problems, 2 points",
         partial(simulate_non_inferiority_at_the_margin, case=Case(ALONE_550, 0.95, loss=0.02), level=SMALL_LEVEL),
         10_000, SMALL_LEVEL, "most", 0.00025),
    Rate("an equal policy is found better, at 2.5%: runs differ by group, 110 groups of 5, 2 samples",
         partial(simulate_equal_found_better, case=BY_GROUP, level=LEVEL), 5000, LEVEL, "most", 0.0855),
    Rate("an equal policy is found better, at 0.03%: the same",
         partial(simulate_equal_found_better, case=BY_GROUP, level=SMALL_LEVEL), 10_000, SMALL_LEVEL, "most", 0.0094),
)  # fmt: skip
