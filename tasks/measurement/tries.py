"""What another policy reaches with several tries, a perfect verifier choosing among them, at the cost of one episode.

Training moves chances: what it solves in one try, its start may solve in several. So the sceptic's comparison gives the
start as many tries as cost the tokens of one episode of the trained policy. A real verifier does worse than a perfect
one, so this is the most that sampling could do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

from tasks.core.records import Trajectory
from tasks.measurement.intervals import clustered_interval, mean
from tasks.measurement.statistics import groups_by_problem, pass_at_k, success_by_problem


class BestOfK(TypedDict):
    """Success where any of `k` episodes is enough; `k` need not be whole.

    `same_cost` tries cost as many sampled tokens as one episode of the other policy; `k` is less where fewer were
    measured. `tries_to_match` is the fewest whole tries that reach the other's success; None: more than `num_samples`,
    the fewest measured of any problem.
    """

    k: float
    same_cost: float
    success_rate: float
    ci_low: float
    ci_high: float
    num_problems: int
    num_samples: int
    tries_to_match: int | None


def best_of_k(start: Sequence[Trajectory], trained: Sequence[Trajectory], *, confidence: float) -> BestOfK:
    """The start's best of k at the cost of one trained episode; at least one try, however long the start's are."""
    success, groups = success_by_problem(start), groups_by_problem(start)
    counts = [(len(samples), sum(samples)) for samples in success.values()]
    num_samples = min(count for count, _ in counts)
    same_cost = max(1.0, mean_tokens(trained) / max(1.0, mean_tokens(start)))
    k = min(same_cost, float(num_samples))
    values = [pass_within(*count, k) for count in counts]
    low, high = clustered_interval(values, [groups[problem] for problem in success], confidence=confidence)
    target = mean([sum(samples) / len(samples) for samples in success_by_problem(trained).values()])
    return {
        "k": round(k, 6),
        "same_cost": round(same_cost, 6),
        "success_rate": round(mean(values), 6),
        "ci_low": round(low, 6),
        "ci_high": round(high, 6),
        "num_problems": len(values),
        "num_samples": num_samples,
        "tries_to_match": next(
            (
                tries
                for tries in range(1, num_samples + 1)
                if mean([pass_at_k(*count, tries) for count in counts]) >= target
            ),
            None,
        ),
    }


def pass_within(num_samples: int, num_successes: int, k: float) -> float:
    """`pass_at_k` for any k ≥ 1: the next lower or higher whole number of tries, drawn so that their mean is k."""
    whole, more = math.floor(k), k - math.floor(k)
    likely = pass_at_k(num_samples, num_successes, whole)
    return likely if not more else (1 - more) * likely + more * pass_at_k(num_samples, num_successes, whole + 1)


def mean_tokens(trajectories: Sequence[Trajectory]) -> float:
    """Sampled tokens per measured episode."""
    return mean([item.num_sampled_tokens for item in trajectories if not item.is_lost])
