"""The promotion policy: two policies' episodes on `test` in, a verdict and every check behind it out. Reads no file.

`promote` where every check passes: enough success; better than the other policy, or about as good and cheaper; no
category falls; invalid calls and overlong episodes within their bounds. `reject` where something speaks against the
challenger; `hold` where more evidence could still decide for it.

"With evidence" is meant in one way. A gain must show in the paired interval and in the permutation test. A fall is
told by the test alone: its p-value can only grow when an episode that failed succeeds instead, which an interval's
bound does not promise, since its width may shrink. So a challenger that gets better never turns `promote` into
`reject`. Categories are many, and one in so many falls by luck: their p-values are Holm's, which bounds the chance of
even one false alarm by 1 − confidence. Left out: who the other policy is, and what a person decides beyond the policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from tasks.environments.changes import shown_name
from tasks.measurement.savings import COSTS, saving
from tasks.measurement.significance import holm
from tasks.measurement.statistics import Difference, is_measured, paired_difference, summarise
from tasks.records import Trajectory
from tasks.settings import Settings

Verdict = Literal["promote", "hold", "reject"]
WAYS = ("better", "cheaper")  # one of them is enough; every other check must pass


class CheaperOptions(Settings):
    """About as good and cheaper: how much success may be lost at most, and what must be saved at least."""

    measure: Literal["sampled_tokens", "calls"]
    max_success_loss: float = Field(ge=0, lt=1)
    min_saving: float = Field(ge=0, lt=1)


class PolicyOptions(Settings):
    """What a challenger must show. `or_cheaper: null` leaves being better as the only way."""

    minimum_success: float = Field(ge=0, le=1)
    confidence: float = Field(gt=0, lt=1)
    or_cheaper: CheaperOptions | None
    max_invalid_call_share: float = Field(ge=0, le=1)
    max_overlong_share: float = Field(ge=0, le=1)


@dataclass(frozen=True, slots=True)
class Anchor:
    """The version that success may not fall below, and its episodes on the problems at hand."""

    name: str
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True, slots=True)
class Check:
    """One question to the challenger. `speaks_against`: it failed, and more evidence would hardly change that."""

    name: str
    passed: bool
    speaks_against: bool
    sentence: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "passed", "speaks_against", "sentence", "numbers")}


def judge(
    policy: PolicyOptions,
    challenger: Sequence[Trajectory],
    other: Sequence[Trajectory],
    *,
    alpha: float,
    anchor: Anchor | None,
    snapshot: str,
    other_name: str,
) -> list[Check]:
    """Every check of the policy. All sides are episodes on the same problems; names are for the sentences.

    `alpha` is the chance this decision may take of making a champion that is not better (one-sided, 0 < alpha < ½). A
    challenger promoted as cheaper must not fall below the `anchor`, None before the first champion.
    """
    ours, theirs = list(challenger), list(other)
    result = summarise(ours, confidence=policy.confidence)
    gain = paired_difference(ours, theirs, confidence=1 - 2 * alpha)
    other_success = summarise(theirs, confidence=policy.confidence)["success_rate"]
    from_anchor = gain
    if anchor is not None:
        from_anchor = paired_difference(ours, list(anchor.trajectories), confidence=1 - 2 * alpha)
    cheaper = check_cheaper(policy, gain, from_anchor, ours, theirs)
    return [
        check_minimum(policy, result["success_rate"], snapshot),
        check_better(policy, gain, cheaper, f"{other_name} ({other_success:.1%})", alpha=alpha),
        *([cheaper] if cheaper else []),
        check_categories(policy, ours, theirs),
        check_share(policy, "max_invalid_call_share", result["invalid_call_share"], "of its calls are invalid"),
        check_share(policy, "max_overlong_share", result["outcomes"]["overlong"], "of its episodes end overlong"),
    ]


def verdict_of(checks: Sequence[Check]) -> Verdict:
    """`promote` if all pass and one of the ways is open; else `reject` if any speaks against, else `hold`."""
    is_open = any(check.passed for check in checks if check.name in WAYS)
    if is_open and all(check.passed for check in checks if check.name not in WAYS):
        return "promote"
    return "reject" if any(check.speaks_against for check in checks) else "hold"


def check_minimum(policy: PolicyOptions, success: float, snapshot: str) -> Check:
    passed = success >= policy.minimum_success
    sentence = (
        f"{snapshot} succeeds on {success:.1%} of test, {'at least' if passed else 'below'} "
        f"promote.minimum_success ({policy.minimum_success:.1%})."
    )
    numbers = {"success_rate": success, "minimum_success": policy.minimum_success}
    return Check("minimum_success", passed, not passed, sentence, numbers)


def check_better(
    policy: PolicyOptions, gain: Difference, cheaper: Check | None, against: str, *, alpha: float
) -> Check:
    """Better: the interval at 1 − 2·alpha above 0, and p within 2·alpha. Worse, at 1 − confidence, speaks against it,
    unless being cheaper may do.
    """
    is_better = gain["ci_low"] > 0 and gain["p_value"] <= 2 * alpha
    is_worse = gain["difference"] < 0 and _is_significant(policy, gain)
    may_be_as_good = cheaper is not None and cheaper.numbers["is_cheaper"] and cheaper.numbers["is_within_loss"]
    sentence = (
        f"Against {against} that is {gain['difference']:+.1%}, {100 - 200 * alpha:.4g}% interval "
        f"{gain['ci_low']:+.1%} to {gain['ci_high']:+.1%}, {p_text(gain['p_value'])}: "
        f"{'better' if is_better else 'worse' if is_worse else 'no clear difference'}."
    )
    return Check("better", is_better, is_worse and not may_be_as_good, sentence, {**gain})


def check_cheaper(
    policy: PolicyOptions,
    gain: Difference,
    from_anchor: Difference,
    challenger: Sequence[Trajectory],
    other: Sequence[Trajectory],
) -> Check | None:
    """About as good as the other and as the anchor: both success intervals above −max_success_loss. Cheaper: the
    saving's interval above min_saving.
    """
    options = policy.or_cheaper
    if options is None:
        return None
    saved = saving(challenger, other, COSTS[options.measure], confidence=policy.confidence)
    is_cheaper = saved is not None and saved["ci_low"] > options.min_saving
    is_as_good = min(gain["ci_low"], from_anchor["ci_low"]) > -options.max_success_loss
    numbers = {
        **options.model_dump(),
        **(saved or dict.fromkeys(("challenger", "other", "saving", "ci_low", "ci_high"))),
        "is_cheaper": is_cheaper,
        "is_as_good": is_as_good,
        "is_within_loss": gain["difference"] > -options.max_success_loss,
    }
    sentence = (
        f"{_cost_text(options, saved, policy.confidence)}: {'' if is_cheaper else 'no '}evidence of saving more than "
        f"{options.min_saving:.1%}, {'evidence' if is_as_good else 'none'} of losing less than "
        f"{options.max_success_loss:.1%} of success."
    )
    return Check("cheaper", is_cheaper and is_as_good, False, sentence, numbers)


def check_categories(policy: PolicyOptions, challenger: Sequence[Trajectory], other: Sequence[Trajectory]) -> Check:
    """No category falls: none with fewer successes has a Holm-adjusted p-value within 1 − confidence.

    Where all problems are of one category, its fall is the whole's, which the other checks weigh.
    """
    ours, theirs = _measured_by_category(challenger, other)
    if len(ours) == 1:
        numbers = {"confidence": policy.confidence, "by_category": {}, "falling": []}
        return Check("categories", True, False, "All problems are of one category, so none falls by itself.", numbers)
    confidence = 1 - (1 - policy.confidence) / len(ours)  # of the intervals shown: Bonferroni's
    gains = {name: paired_difference(ours[name], theirs[name], confidence=confidence) for name in ours}
    # A rise is no fall: its p-value must not take a place among those that Holm ranks.
    falls = holm({name: gain["p_value"] if gain["difference"] < 0 else 1.0 for name, gain in gains.items()})
    falling = [name for name, p in falls.items() if p <= _alpha(policy)]
    rows = {
        name: {
            **gain,
            "challenger": summarise(ours[name], confidence=policy.confidence)["success_rate"],
            "other": summarise(theirs[name], confidence=policy.confidence)["success_rate"],
            "p_of_fall": round(falls[name], 6),
            "falls": name in falling,
        }
        for name, gain in gains.items()
    }
    what = "category falls" if len(falling) == 1 else "categories fall"
    told = "; ".join(
        f"{shown_name(name)} {rows[name]['other']:.1%} → {rows[name]['challenger']:.1%}, {p_text(falls[name])}"
        for name in falling
    )
    sentence = (
        f"{len(falling)} {what} with evidence (Holm over {len(gains)}): {told}."
        if falling
        else f"No category falls with evidence (Holm over {len(gains)})."
    )
    numbers = {"confidence": round(confidence, 6), "by_category": rows, "falling": falling}
    return Check("categories", not falling, bool(falling), sentence, numbers)


def check_share(policy: PolicyOptions, bound: str, share: float, words: str) -> Check:
    limit = getattr(policy, bound)
    passed = share <= limit
    sentence = f"{share:.1%} {words}, {'at most' if passed else 'above'} promote.{bound} ({limit:.1%})."
    return Check(bound.removeprefix("max_"), passed, not passed, sentence, {"share": share, "limit": limit})


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _alpha(policy: PolicyOptions) -> float:
    return 1 - policy.confidence


def _is_significant(policy: PolicyOptions, gain: Difference) -> bool:
    return gain["p_value"] <= _alpha(policy)


def _cost_text(options: CheaperOptions, saved: Mapping[str, float] | None, confidence: float) -> str:
    unit = options.measure.replace("_", " ")
    if saved is None:
        return f"Too few problems to compare {unit} an episode"
    return (
        f"{saved['challenger']:.1f} {unit} an episode instead of {saved['other']:.1f} is {0 - saved['saving']:+.1%}, "
        f"{confidence:.0%} interval {0 - saved['ci_high']:+.1%} to {0 - saved['ci_low']:+.1%}"
    )


def _measured_by_category(
    challenger: Sequence[Trajectory], other: Sequence[Trajectory]
) -> tuple[dict[str, list[Trajectory]], dict[str, list[Trajectory]]]:
    """Both sides by category, on the problems that the environment let both finish at least once."""
    sides = [list(filter(is_measured, side)) for side in (challenger, other)]
    common = {item.problem_id for item in sides[0]} & {item.problem_id for item in sides[1]}
    split: list[dict[str, list[Trajectory]]] = []
    for side in sides:
        by_category: dict[str, list[Trajectory]] = defaultdict(list)
        for item in side:
            if item.problem_id in common:
                by_category[item.category].append(item)
        split.append(dict(sorted(by_category.items())))
    return split[0], split[1]
