"""Simulations of what 95% intervals promise where samples of one problem are alike: 93 to 97 of 100 hold the truth.

Standard error of a coverage from 1,000 trials: 0.7 points.
"""

from __future__ import annotations

import numpy as np
import pytest

from tasks.measurement.intervals import clustered_interval, paired_interval

SIZES = [(150, 4), (400, 1), (400, 2), (400, 8)]  # problems, samples of each
NUM_TRIALS = 1_000


def chances(rng: np.random.Generator, num_problems: int, rate: float, likeness: float) -> np.ndarray:
    """Of each problem, in every trial: betas of mean `rate`; two samples of a problem correlate by `likeness`."""
    strength = 1 / likeness - 1
    return rng.beta(rate * strength, (1 - rate) * strength, (NUM_TRIALS, num_problems))


@pytest.mark.parametrize("likeness", [0.3, 0.8])
@pytest.mark.parametrize("rate", [0.02, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(("num_problems", "num_samples"), SIZES)
def test_intervals_of_a_success_rate(num_problems: int, num_samples: int, rate: float, likeness: float):
    rng = np.random.default_rng(1)
    means = rng.binomial(num_samples, chances(rng, num_problems, rate, likeness)) / num_samples
    intervals = [
        clustered_interval(row, confidence=0.95, num_episodes=num_samples * num_problems) for row in means.tolist()
    ]
    assert 0.93 <= np.mean([low <= rate <= high for low, high in intervals]) <= 0.97


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
@pytest.mark.parametrize(("num_problems", "num_samples"), SIZES)
def test_intervals_of_a_difference(num_problems: int, num_samples: int, rate: float):
    """Half of the problems are as hard for one as for the other. Where so few differ at all that the two made-up
    problems weigh as much as they do (95%, few problems, many samples), intervals are too wide and never too narrow.
    """
    rng = np.random.default_rng(1)
    ours, others = chances(rng, num_problems, rate, 0.5), chances(rng, num_problems, rate, 0.5)
    theirs = np.where(rng.random(ours.shape) < 0.5, ours, others)
    differences = (rng.binomial(num_samples, ours) - rng.binomial(num_samples, theirs)) / num_samples
    intervals = [paired_interval(row, confidence=0.95) for row in differences.tolist()]
    covered = np.mean([low <= 0 <= high for low, high in intervals])
    assert 0.93 <= covered <= (0.97 if (rate, num_problems) != (0.95, 150) else 0.99)


def test_a_true_difference_is_covered_as_often():
    rng = np.random.default_rng(1)
    hardness = rng.random((NUM_TRIALS, 200))  # shared by both policies, as one problem is
    ours, theirs = np.where(hardness < 0.8, 0.9, 0.3), np.where(hardness < 0.5, 0.9, 0.3)  # 0.78 and 0.60 on average
    differences = (rng.binomial(4, ours) - rng.binomial(4, theirs)) / 4
    intervals = [paired_interval(row, confidence=0.95) for row in differences.tolist()]
    assert 0.93 <= np.mean([low <= 0.18 <= high for low, high in intervals]) <= 0.97
