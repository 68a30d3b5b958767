"""What an episode costs: the check "as good and cheaper", and the bound on cost.

Were each challenger only compared with the champion before it, thirty small losses within the margin could follow in
thirty nights. So the loss against the anchor, the champion last shown to be better than the anchor before it, must be
within the margin too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.core.records import Trajectory
from tasks.measurement.points import level_text, points, points_text
from tasks.measurement.power import chance_to_show
from tasks.measurement.savings import COSTS, Measure, saving
from tasks.measurement.statistics import Difference, non_inferiority_p_value, success_by_problem
from tasks.stages.promote.checks.check import Check, p_text
from tasks.stages.promote.checks.lost_episodes import Sides
from tasks.stages.promote.settings import CheaperSettings, CostBound


@dataclass(frozen=True, slots=True)
class Anchor:
    """The version that success may not fall below, and its episodes on the problems at hand."""

    name: str
    trajectories: list[Trajectory]


def check_cheaper(
    options: CheaperSettings, sides: Sides, anchor: Anchor | None, *, alpha: float, other_name: str
) -> Check:
    """Passes where each loss, against the other and the anchor, is shown to be below max_success_loss at `alpha`, in
    the worst case of lost episodes, and the interval of the saving, at 1 − 2·alpha, is above min_saving.
    """
    confidence = 1 - 2 * alpha
    saved = saving(sides.challenger, sides.other, COSTS[options.measure], confidence=confidence)
    is_cheaper = saved is not None and saved["ci_low"] > options.min_saving
    margin = options.max_success_loss
    losses = {other_name: loss_against(sides, margin=margin, alpha=alpha)}
    if anchor is not None and anchor.name != other_name:
        losses[anchor.name] = loss_against(Sides(sides.challenger, anchor.trajectories), margin=margin, alpha=alpha)
    is_as_good = all(loss["is_as_good"] for loss in losses.values())
    numbers = {
        **options.model_dump(),
        **(saved or dict.fromkeys(("challenger", "other", "saving", "ci_low", "ci_high"))),
        "is_cheaper": is_cheaper,
        "is_as_good": is_as_good,
        "is_within_loss": all(loss["difference"] > -margin for loss in losses.values()),
        "losses": losses,
        "anchor": anchor.name if anchor else None,
    }
    sentence = (
        f"{_cost_text(options.measure, saved, confidence)}: {'' if is_cheaper else 'no '}evidence of saving more than "
        f"{options.min_saving:.1%}, {'evidence' if is_as_good else 'none'} of losing less than "
        f"{points_text(margin)} of success {_losses_text(losses)}."
    )
    return Check("cheaper", is_cheaper and is_as_good, False, sentence, numbers)


def loss_against(sides: Sides, *, margin: float, alpha: float) -> dict[str, Any]:
    """The difference, whether the loss is shown to be below `margin`, and an equally good challenger's chance of it."""
    worst = sides.in_the_worst_case()
    ours, theirs = (success_by_problem(side) for side in (worst.challenger, worst.other))
    p = non_inferiority_p_value(ours, theirs, sides.groups, margin=margin)
    found: Difference = sides.compare(confidence=1 - 2 * alpha)
    return {
        "difference": found["difference"],
        "worst_difference": (found if sides.is_whole else worst.compare(confidence=1 - 2 * alpha))["difference"],
        "p_value": p,
        "is_as_good": p <= alpha,
        "chance_if_equal": chance_to_show(margin, width=found["ci_high"] - found["ci_low"], alpha=alpha),
    }


def check_cost(bound: CostBound, sides: Sides, *, confidence: float) -> Check:
    """The interval of the rise in mean cost ends at or below the bound. Failing holds: more evidence may narrow it."""
    saved = saving(sides.challenger, sides.other, COSTS[bound.measure], confidence=confidence)
    highest = None if saved is None else 0 - saved["ci_low"]
    passed = highest is not None and highest <= bound.share
    told = "at most" if passed else "which may be above" if highest is not None else "so nothing shows it to be within"
    sentence = (
        f"{_cost_text(bound.measure, saved, confidence)}, {told} promote.max_cost_increase ({bound.share:+.1%})"
        f"{'' if passed else ': better or not, it would cost too much'}."
    )
    numbers = {**bound.model_dump(), **(saved or {}), "highest_increase": highest}
    return Check("cost", passed, False, sentence, numbers)


def _losses_text(losses: Mapping[str, Mapping[str, Any]]) -> str:
    told = []
    for name, loss in losses.items():
        equal = f"{loss['chance_if_equal']:.0%} of the time"
        chance = "" if loss["is_as_good"] else f"; a model that is as good would be found so {equal}"
        told.append(f"{name} ({points(loss['difference'])} points, {p_text(loss['p_value'])}{chance})")
    return f"against {' and '.join(told)}"


def _cost_text(measure: Measure, saved: Mapping[str, float] | None, confidence: float) -> str:
    unit = measure.replace("_", " ")
    if saved is None:
        return f"Too few problems to compare {unit} per episode"
    return (
        f"{saved['challenger']:.1f} {unit} per episode instead of {saved['other']:.1f} is {0 - saved['saving']:+.1%}, "
        f"{level_text(confidence)} interval {0 - saved['ci_high']:+.1%} to {0 - saved['ci_low']:+.1%}"
    )
