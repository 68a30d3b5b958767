"""Measures both sides of a decision on the unseen test problems, and asks the policy for a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import json_hash
from tasks.core.json_diff import listed, shown_name
from tasks.core.terminal import tell
from tasks.core.text import counted
from tasks.measurement.points import points_text
from tasks.measurement.power import detectable_change
from tasks.measurement.statistics import groups_by_problem, paired_difference, success_rate, summarise
from tasks.stages.evaluate.measurement_key import list_parts
from tasks.stages.promote.allowance import allowance_warnings
from tasks.stages.promote.challenger import Challenger, measure_challenger, measurement_row
from tasks.stages.promote.checks.categories import refuse_unknown_categories
from tasks.stages.promote.decision import Decision
from tasks.stages.promote.opponent import (
    FoundAnchor,
    Opponent,
    find_anchor,
    find_opponent,
    recorded_success,
    unmeasured_anchor_row,
)
from tasks.stages.promote.policy import check_all, decision_of
from tasks.stages.promote.settings import PolicySettings
from tasks.stages.promote.unseen import Unseen, unseen_problems

if TYPE_CHECKING:
    from tasks.stages.promote.episodes import Conditions
    from tasks.stages.promote.settings import PromoteSettings


class Comparison(NamedTuple):
    """`measured` is the challenger with all its episodes of today's key; the others have only those of the unseen
    problems.
    """

    measured: Challenger
    challenger: Challenger
    opponent: Opponent
    anchor: FoundAnchor | None
    unseen: Unseen
    detectable_difference: dict[str, Any]

    @property
    def episodes_hash(self) -> str:
        anchor = self.anchor.trajectories if self.anchor else []
        compared = (self.challenger.trajectories, self.opponent.trajectories, anchor)
        return json_hash([json_hash([item.to_row() for item in side]) for side in compared])

    @property
    def note(self) -> dict[str, Any]:
        return {
            "snapshot": self.challenger.snapshot,
            "weights": self.challenger.weights[:12],
            "against": self.opponent.name,
            "num_problems": self.challenger.result["num_problems"],
        }


class NotComparable(ValueError):
    """Why the sides could not be measured, with what was known by then."""

    def __init__(self, reason: ValueError, unseen: Unseen | None, detectable_difference: dict[str, Any] | None):
        super().__init__(str(reason))
        self.unseen, self.detectable_difference = unseen, detectable_difference


def measure_both_sides(
    settings: PromoteSettings, challenger: Challenger, conditions: Conditions, *, alpha: float
) -> Comparison:
    """Both sides and the anchor, played where no kept episodes have today's key. What can be detected is printed first,
    for the opponent's recorded success, and again where the measured one differs, which is the one that counts.
    NotComparable where they cannot be measured, or a category in params has no test problems.
    """
    confidence, unseen, detectable = settings.confidence, None, None
    try:
        unseen = unseen_problems(
            (challenger.snapshot, challenger.folder), conditions, minimum=settings.min_unseen_problems
        )
        unseen.refuse_too_few()
        refuse_unknown_categories(settings.categories, {item.category for item in challenger.trajectories})
        recorded = recorded_success(challenger, conditions)
        on_unseen = challenger.on(unseen, confidence=confidence)
        planned = find_detectable_difference(settings, on_unseen, recorded.rate, alpha=alpha)
        tell(f"promote: {detectable_text(planned, recorded.origin)}")
        detectable = planned if recorded.origin is None else None

        measured = measure_challenger(challenger, conditions)
        opponent = find_opponent(measured, conditions).on(unseen)
        anchor = find_anchor(opponent, unseen, conditions)

        on_unseen = measured.on(unseen, confidence=confidence)
        success = success_rate(opponent.trajectories)
        detectable = find_detectable_difference(settings, on_unseen, success, alpha=alpha)
        if detectable != planned:
            tell(f"promote: {detectable_text(detectable, f'{opponent.name}, as measured')}")
    except ValueError as error:
        raise NotComparable(error, unseen, detectable) from error
    return Comparison(measured, on_unseen, opponent, anchor, unseen, detectable)


def find_detectable_difference(
    settings: PolicySettings, challenger: Challenger, success_rate: float, *, alpha: float
) -> dict[str, Any]:
    """The smallest gain over such an opponent that a one-sided test at `alpha` finds with promote.power; None where
    even solving everything would not be found.
    """
    given = {
        "success_rate": success_rate,
        "num_problems": challenger.result["num_problems"],
        "samples_per_problem": challenger.result["samples_per_problem"],
        "num_groups": len(set(groups_by_problem(challenger.trajectories).values())),
        "power": settings.power,
    }
    return {"difference": detectable_change("gain", level=alpha, **given), "alpha": alpha, **given}


def detectable_text(found: Mapping[str, Any], origin: str | None) -> str:
    """A detectable difference; `origin` says whose or which success it is of, where that is not plain."""
    gain, samples = found["difference"], found["samples_per_problem"]
    told = f"a gain of {points_text(gain)} is" if gain is not None else "not even the gain to 100% is"
    return (
        f"{counted(found['num_problems'], 'test problem')} of {counted(found['num_groups'], 'group')}, "
        f"{counted(samples, 'episode')} each: over {found['success_rate']:.1%}"
        f"{f' ({origin})' if origin else ''} {told} found with a chance of {found['power']:.0%}, a smaller one more "
        f"rarely; one that is no better passes with at most {found['alpha']:.3%}"
    )


def compare(policy: PolicySettings, comparison: Comparison, *, alpha: float) -> Decision:
    challenger, opponent, anchor = comparison.challenger, comparison.opponent, comparison.anchor
    ours, theirs = challenger.trajectories, opponent.trajectories
    checks = check_all(
        policy,
        ours,
        theirs,
        alpha=alpha,
        anchor=anchor,
        snapshot=challenger.snapshot,
        other_name=opponent.name,
    )
    difference = {
        "against": opponent.name,
        **paired_difference(ours, theirs, confidence=policy.confidence),
        "challenger": result_row(challenger.result),
        "other": result_row(summarise(theirs, confidence=policy.confidence)),
    }
    return Decision(
        decision_of(checks),
        [*(check.sentence for check in checks), *_remarks(comparison)],
        difference,
        opponent.differing_fields,
        checks,
        warnings=[anchor.warning] if anchor and anchor.warning else [],
        anchor=anchor.to_row(ours, alpha=alpha) if anchor else None,
    )


def describe_comparison(
    decision: Decision, comparison: Comparison, rows: Mapping[str, Any], conditions: Conditions
) -> Decision:
    """The decision with what was compared; `rows` are its error budget and its test set."""
    from tasks.tracking.history import first_promotion_note, summarise_journal

    history = summarise_journal(conditions.journal.entries)
    first_again = first_promotion_note(history) if conditions.champion is None else None
    unseen = comparison.unseen
    return replace(
        decision,
        reasons=[*decision.reasons, *(note for note in (unseen.sentence, first_again) if note)],
        warnings=[*unseen.warnings, *decision.warnings, *allowance_warnings(rows)],
        measurement=measurement_row(comparison.measured, comparison.opponent.episodes),
        detectable_difference=comparison.detectable_difference,
        unseen=unseen.to_row(),
        **rows,
    )


def describe_unmeasured(challenger: Challenger, conditions: Conditions, error: NotComparable) -> Decision:
    """A forced decision whose sides could not be measured."""
    return Decision(
        "hold",
        [],
        warnings=[
            f"The checks could not be made and were overruled: {error}",
            *(error.unseen.warnings if error.unseen else []),
        ],
        anchor=unmeasured_anchor_row(conditions),
        measurement=measurement_row(challenger),
        detectable_difference=error.detectable_difference,
        unseen=error.unseen.to_row() if error.unseen else None,
    )


def result_row(result: Mapping[str, Any]) -> dict[str, Any]:
    names = ("success_rate", "ci_low", "ci_high", "num_problems", "samples_per_problem")
    conduct = ("mean_sampled_tokens", "mean_calls", "invalid_call_share")
    overlong = result["outcomes"]["overlong"]
    return {**{name: result[name] for name in (*names, *conduct)}, "overlong_share": overlong}


def _remarks(comparison: Comparison) -> list[str]:
    challenger, opponent, remarks = comparison.challenger, comparison.opponent, []
    if opponent.differing_fields:
        shown = listed([shown_name(field) for field in opponent.differing_fields])
        remarks.append(f"The environment differs from the champion's in: {shown}.")
    again = {challenger.snapshot: challenger.measured_again_for, opponent.name: opponent.episodes.differed_in}
    return remarks + [
        f"Measured again: {name}, whose episodes had been played otherwise ({list_parts(parts)})."
        for name, parts in again.items()
        if parts
    ]
