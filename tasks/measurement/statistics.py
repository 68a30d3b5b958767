"""Success rates with intervals clustered by split group, and paired comparisons of two policies.

Samples of one problem are alike, and so are problems of one split group, which share their solution. So the success
rate is the mean of per-problem means, and every error comes from how the *split groups* differ. Trajectories in, plain
JSON-ready numbers out. Episodes that ended in `environment_error` are our fault, not the policy's: they count in
`outcomes` and nowhere else.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple, NotRequired, TypeAlias, TypedDict, get_args

from tasks.core.records import Outcome, Trajectory
from tasks.core.text import counted
from tasks.measurement.intervals import (
    check_confidence,
    clustered_interval,
    difference_p_value,
    mean,
    paired_interval,
)
from tasks.measurement.significance import mcnemar_p_value, sign_flip_p_values

Success = dict[str, list[bool]]  # of each sample, by problem id


class EpisodeSummary(NamedTuple):
    """What statistics read of a Trajectory and no more: thousands of them fit in memory."""

    problem_id: str
    category: str
    split_group: str
    outcome: Outcome
    is_success: bool
    is_lost: bool
    num_sampled_tokens: int
    num_thought_tokens: int
    has_thoughts: bool
    num_sequences: int
    num_calls: int
    num_invalid_calls: int

    @classmethod
    def of(cls, episode: Episode) -> EpisodeSummary:
        return episode if isinstance(episode, cls) else cls._make(_read_summary(episode))


_read_summary = attrgetter(*EpisodeSummary._fields)


Episode: TypeAlias = Trajectory | EpisodeSummary


class CategoryResult(TypedDict):
    """One policy on the problems of one category. Rates and shares are in 0..1; means are per episode.

    `pass_at_k` and `pass_hat_k` (any of k, all of k) use k = the fewest measured samples of any problem, which is
    `samples_per_problem` unless an environment error cost one. `mean_thinking_tokens`, of the sampled ones, are
    those of thoughts; without a thought there is no such key, nor `mean_sequences` where no episode has several.
    """

    success_rate: float
    ci_low: float
    ci_high: float
    num_problems: int
    samples_per_problem: int
    outcomes: dict[str, float]
    mean_sampled_tokens: float
    mean_thinking_tokens: NotRequired[float]
    mean_sequences: NotRequired[float]
    mean_calls: float
    invalid_call_share: float
    pass_at_k: float
    pass_hat_k: float


class _WhereSome(TypedDict):
    mean_thinking_tokens: NotRequired[float]
    mean_sequences: NotRequired[float]


class Result(CategoryResult):
    by_category: dict[str, CategoryResult]


class Difference(TypedDict):
    """Success of a challenger minus that of another policy on the same problems, with its interval.

    If the policies were equal, `p_value` (two-sided) is the chance of a difference as large and `p_greater` that of one
    as high, by `test`. Both flip signs of `num_groups` whole split groups.
    """

    difference: float
    ci_low: float
    ci_high: float
    num_problems: int
    num_groups: int
    p_value: float
    p_greater: float
    test: Literal["sign_flip", "mcnemar"]


def summarise(trajectories: Iterable[Episode], *, confidence: float) -> Result:
    """Everything reported about one policy on a set of problems, rounded to 6 digits. A category whose episodes all
    ended in an environment error is left out.
    """
    check_confidence(confidence)
    episodes = [EpisodeSummary.of(item) for item in trajectories]
    _refuse_only_lost(episodes)
    categories = sorted(_by_category(episodes).items())
    return {
        **_summary(episodes, confidence),
        "by_category": {
            category: _summary(items, confidence)
            for category, items in categories
            if not all(item.is_lost for item in items)
        },
    }


def success_rate(trajectories: Sequence[Episode]) -> float:
    """That of `summarise` alone."""
    _refuse_only_lost(trajectories)
    return _round(mean([sum(samples) / len(samples) for samples in success_by_problem(trajectories).values()]))


def _refuse_only_lost(episodes: Sequence[Episode]) -> None:
    if all(item.is_lost for item in episodes):
        raise ValueError(
            f"{counted(len(episodes), 'trajectory', 'trajectories')}, all ended by an environment error, so there is "
            f"no success rate. Look for the fault in the environment's tools, then run the stage again."
        )


def paired_difference(challenger: list[Trajectory], other: list[Trajectory], *, confidence: float) -> Difference:
    """Mean over problems of (challenger's success − the other's), with an interval clustered by split group."""
    _refuse_other_problems(challenger, other)
    sides = success_by_problem(challenger), success_by_problem(other)
    return compare_success(*sides, groups_by_problem(challenger), confidence=confidence)


def compare_success(ours: Success, theirs: Success, groups: Mapping[str, str], *, confidence: float) -> Difference:
    """As `paired_difference`, from successes by problem; `groups` names the split group of each problem.

    Each problem gives one difference of per-problem means, each group the sum of its problems'. Where every group is
    one problem that both sides measured once, the sign-flip test is McNemar's exact test and is called so.
    """
    steps, unit, labels = paired_steps(ours, theirs, groups)
    low, high = paired_interval([step / unit for step in steps], labels, confidence=confidence)
    sums = sums_by_group(steps, labels)
    is_single = len(sums) == len(steps) and all(len(ours[key]) == len(theirs[key]) == 1 for key in ours.keys() & theirs)
    p_value, p_greater = sign_flip_p_values(sums)
    if is_single:
        p_value = mcnemar_p_value(sum(total > 0 for total in sums), sum(total < 0 for total in sums))
    return {
        "difference": _round(sum(steps) / unit / len(steps)),
        "ci_low": _round(low),
        "ci_high": _round(high),
        "num_problems": len(steps),
        "num_groups": len(sums),
        "p_value": _round_p(p_value),
        "p_greater": _round_p(p_greater),
        "test": "mcnemar" if is_single else "sign_flip",
    }


def non_inferiority_p_value(ours: Success, theirs: Success, groups: Mapping[str, str], *, margin: float) -> float:
    """One-sided p-value: small where our success is shown to be less than `margin` (0..1) below theirs."""
    steps, unit, labels = paired_steps(ours, theirs, groups)
    return _round_p(difference_p_value([step / unit for step in steps], labels, above=-margin))


def groups_by_problem(trajectories: Iterable[Episode]) -> dict[str, str]:
    """The split group of each problem; a problem without one is a group of its own."""
    return {item.problem_id: item.split_group or item.problem_id for item in trajectories}


def paired_steps(ours: Success, theirs: Success, groups: Mapping[str, str]) -> tuple[list[int], int, list[str]]:
    """Our mean success minus theirs on each shared problem, by id, as whole multiples of 1/unit; that unit; and the
    group of each. Whole numbers add up exactly, so equal sums are equal.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise ValueError(
            "no problem was measured for both policies, so there is nothing to compare. "
            "Check that both lists contain episodes without an environment error."
        )
    unit = math.lcm(*{len(side[key]) for side in (ours, theirs) for key in shared})
    steps = [_in_units(ours[key], unit) - _in_units(theirs[key], unit) for key in shared]
    return steps, unit, [groups[key] for key in shared]


def sums_by_group(steps: Sequence[int], labels: Sequence[str]) -> list[int]:
    sums: Counter[str] = Counter()
    for step, label in zip(steps, labels, strict=True):
        sums[label] += step
    return list(sums.values())


def _in_units(samples: Sequence[bool], unit: int) -> int:
    return sum(samples) * (unit // len(samples))


def success_by_problem(trajectories: Iterable[Episode], *, lost_fail: bool = False) -> Success:
    """Success of each measured sample by problem; problems with only environment errors are left out, unless
    `lost_fail`: then an episode that the environment lost is a failed one.
    """
    success: Success = defaultdict(list)
    for item in trajectories:
        if lost_fail or not item.is_lost:
            success[item.problem_id].append(item.is_success)
    return dict(success)


def pass_at_k(num_samples: int, num_successes: int, k: int) -> float:
    """Chance that at least one of k samples succeeds, unbiased: 1 − C(n−c, k) / C(n, k). Source: arXiv:2107.03374."""
    assert 1 <= k <= num_samples
    num_draws = math.comb(num_samples, k)
    return (num_draws - math.comb(num_samples - num_successes, k)) / num_draws  # rounded once: c/n for k = 1


def pass_hat_k(num_samples: int, num_successes: int, k: int) -> float:
    """Chance that all of k samples succeed, unbiased: C(c, k) / C(n, k). Source: τ-bench, arXiv:2406.12045."""
    assert 1 <= k <= num_samples
    return math.comb(num_successes, k) / math.comb(num_samples, k)


def _summary(trajectories: list[EpisodeSummary], confidence: float) -> CategoryResult:
    measured = [item for item in trajectories if not item.is_lost]
    success = success_by_problem(measured)
    means, groups = [sum(samples) / len(samples) for samples in success.values()], groups_by_problem(measured)
    labels = [groups[problem] for problem in success]
    low, high = clustered_interval(means, labels, confidence=confidence, num_episodes=len(measured))
    counts = [(len(samples), sum(samples)) for samples in success.values()]
    fewest = min(num_samples for num_samples, _ in counts)
    num_calls = sum(item.num_calls for item in measured)
    num_invalid_calls = sum(item.num_invalid_calls for item in measured)
    outcomes = Counter(item.outcome for item in trajectories)
    return {
        "success_rate": _round(mean(means)),
        "ci_low": _round(low),
        "ci_high": _round(high),
        "num_problems": len(means),
        "samples_per_problem": max(Counter(item.problem_id for item in trajectories).values()),
        "outcomes": {outcome: _round(outcomes[outcome] / len(trajectories)) for outcome in get_args(Outcome)},
        "mean_sampled_tokens": _round(mean([item.num_sampled_tokens for item in measured])),
        **_where_some(measured),
        "mean_calls": _round(num_calls / len(measured)),
        "invalid_call_share": _round(num_invalid_calls / num_calls if num_calls else 0.0),
        "pass_at_k": _round(mean([pass_at_k(*count, fewest) for count in counts])),
        "pass_hat_k": _round(mean([pass_hat_k(*count, fewest) for count in counts])),
    }


def _where_some(measured: list[EpisodeSummary]) -> _WhereSome:
    found: _WhereSome = {}
    if any(item.has_thoughts for item in measured):
        found["mean_thinking_tokens"] = _round(mean([item.num_thought_tokens for item in measured]))
    if any(item.num_sequences > 1 for item in measured):
        found["mean_sequences"] = _round(mean([item.num_sequences for item in measured]))
    return found


def _refuse_other_problems(challenger: list[Trajectory], other: list[Trajectory]) -> None:
    unpaired = {item.problem_id for item in challenger} ^ {item.problem_id for item in other}
    if unpaired:
        example = min(unpaired)
        raise ValueError(
            f"{len(unpaired)} problems (such as {example!r}) were measured for one policy and not for the other, so "
            f"their difference would compare unlike problems. Measure both policies on the same problems."
        )


def _by_category(trajectories: list[EpisodeSummary]) -> dict[str, list[EpisodeSummary]]:
    categories: dict[str, list[EpisodeSummary]] = defaultdict(list)
    for item in trajectories:
        categories[item.category].append(item)
    return dict(categories)


def _round(value: float) -> float:
    return round(value, 6)


def _round_p(p_value: float) -> float:
    return float(f"{p_value:.6g}")  # significant digits, so that small values keep theirs
