"""The promotion policy: two models' episodes on `test` in, every check and the decision out. Reads no file.

`promote` where every check passes; `reject` where something speaks against the challenger; `hold` where more evidence
could still decide for it. A gain must show in the paired interval and in the permutation test, with every lost episode
counted against the challenger (`checks/lost_episodes.py`), at the error this decision may spend. A fall must show in
the test alone, as measured: its p-value can only grow when a failed episode succeeds instead, which an interval's bound
does not promise. So a challenger that gets better never turns `promote` into `reject`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.records import DecisionKind, Trajectory
from tasks.core.text import counted
from tasks.measurement.points import interval_text, level_text, points
from tasks.measurement.significance import smallest_p_value
from tasks.measurement.statistics import CategoryResult, Difference, success_rate, summarise
from tasks.report.marks import WAYS, Way
from tasks.stages.promote.checks.categories import check_categories
from tasks.stages.promote.checks.check import Check, p_text
from tasks.stages.promote.checks.cost import Anchor, check_cheaper, check_cost
from tasks.stages.promote.checks.lost_episodes import Sides, check_lost
from tasks.stages.promote.settings import PolicySettings


def check_all(
    policy: PolicySettings,
    challenger: Sequence[Trajectory],
    other: Sequence[Trajectory],
    *,
    alpha: float,
    anchor: Anchor | None,
    snapshot: str,
    other_name: str,
) -> list[Check]:
    """Every check of the policy on episodes of the same problems; names are for the sentences.

    `alpha` is the chance (one-sided, 0 < alpha < ½) that this decision may take of making a champion that is not
    better. `anchor` is None before the first champion, which has no bound on cost either.
    """
    assert 0 < alpha < 0.5
    sides, confidence = Sides(list(challenger), list(other)), policy.confidence
    result = summarise(sides.challenger, confidence=confidence)
    cheaper = None
    if policy.or_cheaper is not None:
        cheaper = check_cheaper(policy.or_cheaper, sides, anchor, alpha=alpha, other_name=other_name)
    cost = None
    if policy.max_cost_increase is not None and anchor is not None:
        cost = check_cost(policy.max_cost_increase, sides, confidence=confidence)
    return [
        check_minimum(policy, sides, snapshot),
        check_better(policy, sides, cheaper, other_name, alpha=alpha),
        *([cheaper] if cheaper else []),
        *([cost] if cost else []),
        *check_categories(policy.categories, sides, confidence=confidence, power=policy.power),
        check_lost(sides, most=policy.max_extra_lost_share, confidence=confidence),
        check_share(policy, "max_invalid_call_share", result["invalid_call_share"], "of its calls are invalid"),
        check_share(policy, "max_overlong_share", result["outcomes"]["overlong"], "of its episodes end overlong"),
    ]


def decision_of(checks: Sequence[Check]) -> DecisionKind:
    """`promote` if all pass and one of the ways is open; else `reject` if any speaks against, else `hold`."""
    if way_of(checks) and all(check.passed for check in checks if check.name not in WAYS):
        return "promote"
    return "reject" if any(check.speaks_against for check in checks) else "hold"


def way_of(checks: Sequence[Check]) -> Way | None:
    """The open way: better where both are, None where neither is."""
    passed = {check.name for check in checks if check.passed}
    return next((way for way in WAYS if way in passed), None)


def is_next_anchor(challenger: Sequence[Trajectory], anchor: Anchor | None, *, alpha: float) -> bool:
    """Whether the challenger, as champion, becomes the anchor: only if shown to be better than the present one. One
    that merely looks as good is chosen partly by luck, and the anchor would sink with each.
    """
    if anchor is None:
        return True
    worst = Sides(list(challenger), anchor.trajectories).in_the_worst_case()
    return worst.compare(confidence=1 - 2 * alpha)["p_greater"] <= alpha


def check_minimum(policy: PolicySettings, sides: Sides, snapshot: str) -> Check:
    """The interval of success, lost episodes as failures, reaches the minimum. Below it as measured speaks against."""
    measured: CategoryResult = summarise(sides.challenger, confidence=policy.confidence)
    worst = summarise(sides.in_the_worst_case().challenger, confidence=policy.confidence)
    success, lowest, least = measured["success_rate"], worst["ci_low"], policy.minimum_success
    passed = lowest >= least
    told = "at least" if passed else "below" if success < least else "not surely at least"
    lost = f", its {counted(sides.num_lost[0], 'lost episode')} counted as failures," if sides.num_lost[0] else ""
    sentence = (
        f"{snapshot} succeeds on {success:.1%} of test, and its {level_text(policy.confidence)} interval{lost} begins "
        f"at {lowest:.1%}: {told} promote.minimum_success ({least:.1%})."
    )
    numbers = {"success_rate": success, "ci_low": lowest, "minimum_success": least}
    return Check("minimum_success", passed, success < least, sentence, numbers)


def check_better(
    policy: PolicySettings, sides: Sides, cheaper: Check | None, other_name: str, *, alpha: float
) -> Check:
    """Passes where the interval at 1 − 2·alpha is above 0 and the one-sided p within alpha, also in the worst case of
    lost episodes. Worse, at 1 − confidence and as measured, speaks against it, unless being cheaper is enough.
    """
    confidence = 1 - 2 * alpha
    gain = sides.compare(confidence=confidence)
    worst = gain if sides.is_whole else sides.in_the_worst_case().compare(confidence=confidence)
    is_better = worst["ci_low"] > 0 and worst["p_greater"] <= alpha
    is_worse = gain["difference"] < 0 and gain["p_value"] <= 1 - policy.confidence
    may_be_as_good = cheaper is not None and cheaper.numbers["is_cheaper"] and cheaper.numbers["is_within_loss"]
    lost = ""
    if not sides.is_whole:
        lost = (
            f"; {counted(sum(sides.num_lost), 'lost episode')} counted against it, {points(worst['difference'])} "
            f"points ({interval_text(worst)}, {p_text(worst['p_value'])})"
        )
    success = success_rate(sides.other)
    sentence = (
        f"Against {other_name} ({success:.1%}) that is {points(gain['difference'])} points, "
        f"{level_text(confidence)} interval {interval_text(gain)}, {p_text(gain['p_value'])}{lost}: "
        f"{'better' if is_better else 'worse' if is_worse else _why_not_better(worst, alpha)}."
    )
    if smallest_p_value(gain["num_groups"]) > alpha:
        sentence += (
            f" {counted(gain['num_groups'], 'split group')} can show no gain at that level, whatever the episodes: "
            f"bring problems of more groups (curate.source, curate.num_generated, curate.max_test_problems)."
        )
    numbers = {**gain, "alpha": alpha, "num_lost": list(sides.num_lost), "worst_case": dict(worst)}
    return Check("better", is_better, is_worse and not may_be_as_good, sentence, numbers)


def _why_not_better(gain: Difference, alpha: float) -> str:
    """The interval and the test are two methods, and of few groups the interval is the more careful one."""
    if gain["p_greater"] <= alpha:
        return "not surely better, since the interval has to lie above 0 too"
    return "no clear difference"


def check_share(policy: PolicySettings, bound: str, share: float, words: str) -> Check:
    limit = getattr(policy, bound)
    passed = share <= limit
    sentence = f"{share:.1%} {words}, {'at most' if passed else 'above'} promote.{bound} ({limit:.1%})."
    return Check(bound.removeprefix("max_"), passed, not passed, sentence, {"share": share, "limit": limit})
