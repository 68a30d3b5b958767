"""Success rates with intervals that hold up: clustered by problem, sane at 0% and 100%, paired where two policies meet.

Samples of one problem are alike, so a hundred samples of one problem are not a hundred facts. Everything here treats
the *problem* as the unit: the success rate is the mean of per-problem means, and intervals come from how those differ.

Trajectories in, plain JSON-ready numbers out; nothing here reads a file. Episodes that ended in `environment_error` are
our fault and not the policy's: they count in `outcomes` and nowhere else. Left out for now: permutation tests and the
smallest detectable difference.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TypedDict, get_args

from tasks.records import Outcome, Trajectory


class TypeResult(TypedDict):
    """Success on the problems of one category."""

    success_rate: float
    ci_low: float
    ci_high: float
    num_problems: int


class Result(TypedDict):
    """One policy on one set of problems. Rates and shares lie in 0..1; means are per episode.

    `pass_at_k` and `pass_hat_k` (any of k, all of k) take k = the fewest samples measured of any problem, which is
    `samples_per_problem` unless an environment error cost one.
    """

    success_rate: float
    ci_low: float
    ci_high: float
    num_problems: int
    samples_per_problem: int
    by_type: dict[str, TypeResult]
    outcomes: dict[str, float]
    mean_sampled_tokens: float
    mean_calls: float
    invalid_call_share: float
    pass_at_k: float
    pass_hat_k: float


class Difference(TypedDict):
    """Success of a challenger minus that of another policy on the same problems, with its interval."""

    difference: float
    ci_low: float
    ci_high: float
    num_problems: int


def summarise(trajectories: list[Trajectory], *, confidence: float) -> Result:
    """Everything reported about one policy on one set of problems; floats are rounded to 6 digits."""
    measured = [item for item in trajectories if item.outcome != "environment_error"]
    if not measured:
        raise ValueError(
            f"{len(trajectories)} trajectories, none of which the environment let finish, so there is no success rate. "
            f"Look for the fault in the environment's tools, then run the stage again."
        )
    success = _success_by_problem(measured)
    counts = [(len(samples), sum(samples)) for samples in success.values()]
    fewest = min(num_samples for num_samples, _ in counts)
    num_calls = sum(item.num_calls for item in measured)
    num_invalid_calls = sum(item.num_invalid_calls for item in measured)
    return {
        **_rate(success, confidence),
        "samples_per_problem": max(len(samples) for samples in _success_by_problem(trajectories).values()),
        "by_type": {
            category: _rate(_success_by_problem(items), confidence)
            for category, items in sorted(_by_category(measured).items())
        },
        "outcomes": {
            outcome: _round(sum(item.outcome == outcome for item in trajectories) / len(trajectories))
            for outcome in get_args(Outcome)
        },
        "mean_sampled_tokens": _round(_mean([item.num_sampled_tokens for item in measured])),
        "mean_calls": _round(num_calls / len(measured)),
        "invalid_call_share": _round(num_invalid_calls / num_calls if num_calls else 0.0),
        "pass_at_k": _round(_mean([pass_at_k(*count, fewest) for count in counts])),
        "pass_hat_k": _round(_mean([pass_hat_k(*count, fewest) for count in counts])),
    }


def clustered_interval(
    success_by_problem: Sequence[float], *, confidence: float, num_episodes: int | None = None
) -> tuple[float, float]:
    """Confidence interval of the mean of per-problem success rates: Wilson's, on the effective number of samples.

    With one sample a problem this is exactly Wilson's score interval, so 0 of 500 gives (0, 0.0076) and not (0, 0).
    `num_episodes`, where known, bounds the effective number: k samples of a problem are at best k facts.
    Source: Wilson on n_eff is what Franco et al. 2019 (doi:10.1093/jssam/smy019) recommend for clustered proportions.
    """
    from scipy.special import ndtri

    _check_confidence(confidence)
    if not success_by_problem:
        raise ValueError("no problem was measured, so there is no interval. Give at least one problem.")
    p, z = _mean(success_by_problem), float(ndtri(0.5 + confidence / 2))
    n = _effective_samples(success_by_problem, confidence, num_episodes)
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, center - half_width), min(1.0, center + half_width)


def paired_difference(challenger: list[Trajectory], other: list[Trajectory], *, confidence: float) -> Difference:
    """Mean over problems of (challenger's success − the other's), with an interval clustered by problem.

    Each problem gives one difference of per-problem means. Before the interval is taken, two made-up problems join: one
    weighs ±1 by halves, one is 0. That keeps it honest where every difference is equal (0 of 500 against 0 of 500 is
    0 ± 0.4 points, not 0 ± 0). `difference` itself stays the plain mean.
    Source: Agresti and Min 2005 (doi:10.1002/sim.1781), their 0.5 a cell carried over to per-problem means.
    """
    from scipy.special import stdtrit

    _check_confidence(confidence)
    differences = _paired_differences(challenger, other)
    total = len(differences) + 2
    center = math.fsum(differences) / total
    variance = (math.fsum(d * d for d in differences) + 1.0) / total - center * center
    half_width = float(stdtrit(total - 1, 0.5 + confidence / 2)) * math.sqrt(variance / total)
    return {
        "difference": _round(_mean(differences)),
        "ci_low": _round(max(-1.0, center - half_width)),
        "ci_high": _round(min(1.0, center + half_width)),
        "num_problems": len(differences),
    }


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Chance that at least one of k samples succeeds, unbiased: 1 − C(n−c, k) / C(n, k). Source: arXiv:2107.03374."""
    assert 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def pass_hat_k(num_samples: int, num_successes: int, k: int) -> float:
    """Chance that all of k samples succeed, unbiased: C(c, k) / C(n, k). Source: τ-bench, arXiv:2406.12045."""
    assert 1 <= k <= num_samples
    return math.comb(num_successes, k) / math.comb(num_samples, k)


def _effective_samples(success_by_problem: Sequence[float], confidence: float, num_episodes: int | None) -> float:
    """How many independent samples would be as sure as these n problems: n·p(1−p)/s², between n and `num_episodes`.

    n is a true floor: means in 0..1 vary at most as p(1−p), which is when each problem is solved always or never. Where
    the problems do not differ at all nothing shows how alike its samples are, so the floor is taken. (z/t)² pays for s²
    being an estimate from few problems. Source: Korn and Graubard 1998, Survey Methodology 24.
    """
    from scipy.special import ndtri, stdtrit

    n, p = len(success_by_problem), _mean(success_by_problem)
    spread = math.fsum((success - p) ** 2 for success in success_by_problem)
    if n < 2 or spread < 1e-12:
        return n
    few_problems = float(ndtri(0.5 + confidence / 2) / stdtrit(n - 1, 0.5 + confidence / 2)) ** 2
    effective = n * p * (1 - p) / (spread / (n - 1)) * few_problems
    return max(n, min(effective, num_episodes) if num_episodes is not None else effective)


def _rate(success: dict[str, list[bool]], confidence: float) -> TypeResult:
    means = [_mean(samples) for samples in success.values()]
    num_episodes = sum(len(samples) for samples in success.values())
    low, high = clustered_interval(means, confidence=confidence, num_episodes=num_episodes)
    return {
        "success_rate": _round(_mean(means)),
        "ci_low": _round(low),
        "ci_high": _round(high),
        "num_problems": len(means),
    }


def _paired_differences(challenger: list[Trajectory], other: list[Trajectory]) -> list[float]:
    """One difference of success a problem both sides measured; problems only an environment error hid are left out."""
    unpaired = {item.problem_id for item in challenger} ^ {item.problem_id for item in other}
    if unpaired:
        example = min(unpaired)
        raise ValueError(
            f"{len(unpaired)} problems (such as {example!r}) were measured for one policy and not for the other, so "
            f"their difference would compare unlike problems. Measure both policies on the same problems."
        )
    ours, theirs = (
        _success_by_problem([item for item in side if item.outcome != "environment_error"])
        for side in (challenger, other)
    )
    differences = [_mean(ours[key]) - _mean(theirs[key]) for key in sorted(ours.keys() & theirs.keys())]
    if not differences:
        raise ValueError(
            "no problem was measured for both policies, so there is nothing to compare. "
            "Check that both lists hold episodes the environment let finish."
        )
    return differences


def _success_by_problem(trajectories: list[Trajectory]) -> dict[str, list[bool]]:
    success: dict[str, list[bool]] = defaultdict(list)
    for item in trajectories:
        success[item.problem_id].append(item.is_success)
    return dict(success)


def _by_category(trajectories: list[Trajectory]) -> dict[str, list[Trajectory]]:
    categories: dict[str, list[Trajectory]] = defaultdict(list)
    for item in trajectories:
        categories[item.category].append(item)
    return dict(categories)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence} is not between 0 and 1, so no interval has it. Use 0.95, say.")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _round(value: float) -> float:
    return round(value, 6)
