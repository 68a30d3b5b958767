"""From a challenger and a champion to a decision: why nothing need be decided, else both sides found and judged.

The steps, in `decide`: what a person took back or holds; what the error budget and the wear of the test problems allow;
the episodes of both sides and of the anchor, without the problems either has seen; the policy's checks; what a person's
override or missing approval makes of the verdict. Nothing is measured before it is known that it will be used. The
policy is in `measurement/promotion_policy.py`; what a decision does to the registry in `publish.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import file_hash, json_hash
from tasks.core.json_diff import listed, shown_name
from tasks.stages.evaluate.measurement_key import named
from tasks.stages.promote.allowance import Allowance, decide_within, hold_for_worn_problems, holdout_set, read_allowance
from tasks.stages.promote.allowance import rows_of as allowance_rows
from tasks.stages.promote.anchor import FoundAnchor, find_anchor, recorded_anchor
from tasks.stages.promote.budget_words import warnings_of
from tasks.stages.promote.challenger import Challenger, measured_under, under_todays_key
from tasks.stages.promote.checks.categories import refuse_unknown_categories
from tasks.stages.promote.checks.cost import Anchor
from tasks.stages.promote.decision import Decision, carried_out
from tasks.stages.promote.detectable import recorded_success, tell_detectable
from tasks.stages.promote.opponent import Opponent, find_opponent
from tasks.stages.promote.overrides import ManualOverride
from tasks.stages.promote.policy import judge, verdict_of
from tasks.stages.promote.settings import PolicySettings
from tasks.stages.promote.unseen import unseen_problems
from tasks.tracking.settings import model_uri

if TYPE_CHECKING:
    from tasks.stages.promote.episodes import Conditions
    from tasks.stages.promote.settings import PromoteSections, PromoteSettings
    from tasks.stages.promote.unseen import Unseen
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version
    from tasks.tracking.waiting import Waiting


class Sides(NamedTuple):
    """Whom a decision compares, on the test problems that neither has seen. `measured` is the challenger with all its
    episodes of today's key, `challenger` and `opponent` have those of the unseen problems.
    """

    measured: Challenger
    challenger: Challenger
    opponent: Opponent
    anchor: FoundAnchor | None
    unseen: Unseen
    detectable: dict[str, Any]


class NotComparable(ValueError):
    """Why the checks could not be made, with what was known by then."""

    def __init__(self, why: ValueError, unseen: Unseen | None, detectable: dict[str, Any] | None):
        super().__init__(str(why))
        self.unseen, self.detectable = unseen, detectable


def decide(
    settings: PromoteSections,
    challenger: Challenger,
    champion: Version | None,
    registry: Registry,
    conditions: Conditions,
    override: ManualOverride | None = None,
) -> tuple[Decision, Challenger]:
    """The policy's verdict, and what a person's override or missing approval makes of it; and the challenger with the
    episodes it was made on. Counts as a look at `test`.

    Either side is measured only where its numbers are needed and no kept ones are of today's key.
    """
    from tasks.tracking.waiting import find_waiting

    options = settings.promote
    stays = f"The champion, version {champion.version}, stays." if champion else "There is still no champion."
    waiting = find_waiting(registry)
    closed = hold_without_checks(options, challenger, champion, waiting, registry, override, stays=stays)
    if closed:
        return closed, challenger
    read = partial(read_decision_allowance, settings, challenger, champion, registry, conditions, override)
    allowance = read()
    worn = hold_for_worn_problems(options, allowance, conditions.paths)
    if worn:
        return replace(worn, reasons=[*worn.reasons, stays]), challenger
    try:
        sides = find_sides(options, challenger, champion, registry, conditions, alpha=allowance.alpha)
    except NotComparable as error:
        if override is None:
            raise
        decision = overrule_unseen(challenger, registry, error)
    else:
        challenger = sides.measured
        read = partial(read, measured=challenger, compared=episodes_hash(sides))
        allowance = read()
        worn = hold_for_worn_problems(options, allowance, conditions.paths)
        if worn:  # by episodes that are not those a decision like this one was taken on
            return replace(worn, reasons=[*worn.reasons, stays]), challenger
        decision, allowance = decide_within(
            allowance,
            registry,
            refresh=read,
            judge=lambda allowed: compare(options, sides, alpha=allowed.alpha),
            note=note_of(sides),
        )
        decision = explain(decision, sides, allowance_rows(options, allowance, registry), registry, champion)
    if challenger.untrained:
        decision = replace(decision, warnings=[challenger.untrained, *decision.warnings])
    approve_until = datetime.now(UTC) + timedelta(days=options.approval_expires_days) if options.approval else None
    decision = carried_out(decision, override, approve_until=approve_until, stays=stays)
    if waiting and decision.verdict != "promote" and decision.approval == "not_needed":
        decision = replace(decision, warnings=[*decision.warnings, waiting.sentence])
    return decision, challenger


def hold_without_checks(
    options: PromoteSettings,
    challenger: Challenger,
    champion: Version | None,
    waiting: Waiting | None,
    registry: Registry,
    override: ManualOverride | None,
    *,
    stays: str,
) -> Decision | None:
    """A decision to hold where nothing need be compared: the model is champion or waits for approval already, or a
    person holds promotions or took it back, whom no schedule overrules. None where the checks are to decide.
    ValueError for an override while promotions are held.
    """
    from tasks.tracking.history import hold_note, refuse_held, rollback_note
    from tasks.tracking.waiting import still_waits, withdrawal_note

    if champion is not None and champion.identity == challenger.files:
        reason = f"{challenger.snapshot} is already champion: version {champion.version} holds the same model."
        why = f"What made it champion: python -m tasks lineage {model_uri(options.model_name, '@champion')}"
        return Decision("hold", [reason, why])
    if override is None and waiting is not None and still_waits(registry, waiting, challenger.files):
        return Decision("hold", [waiting.sentence, stays], approval="waiting")
    if override is not None:
        refuse_held(registry)  # what a person asks for and does not get is a failure
    taken_back = (why(registry, challenger.weights) for why in (rollback_note, withdrawal_note) if override is None)
    reasons = [reason for reason in (hold_note(registry), *taken_back) if reason]
    return Decision("hold", [*reasons, stays]) if reasons else None


def find_sides(
    options: PromoteSettings,
    challenger: Challenger,
    champion: Version | None,
    registry: Registry,
    conditions: Conditions,
    *,
    alpha: float,
) -> Sides:
    """Both sides and the anchor, measured where no kept episodes are of today's key; what can be seen is said first.
    NotComparable where they cannot be found, or the policy asks for what no test problem shows.
    """
    paths, confidence = conditions.paths, options.confidence
    unseen = detectable = None
    try:
        unseen = unseen_problems(
            paths, (challenger.snapshot, challenger.folder), champion, registry, minimum=options.min_unseen_problems
        )
        unseen.refuse_too_few()
        refuse_unknown_categories(options.categories, {item.category for item in challenger.trajectories})
        evaluated = challenger.on(unseen, confidence=confidence)
        success = recorded_success(paths, challenger, champion)
        detectable = tell_detectable(options, evaluated, opponent_success=success, alpha=alpha)
        measured = under_todays_key(challenger, conditions)
        opponent = find_opponent(measured, champion, registry, conditions).on(unseen)
        anchor = None
        if champion is not None:
            anchor = find_anchor(
                registry,
                champion,
                Anchor(opponent.name, opponent.trajectories),
                play=lambda version: find_opponent(measured, version, registry, conditions).on(unseen).trajectories,
            )
    except ValueError as error:
        raise NotComparable(error, unseen, detectable) from error
    return Sides(measured, measured.on(unseen, confidence=confidence), opponent, anchor, unseen, detectable)


def overrule_unseen(challenger: Challenger, registry: Registry, error: NotComparable) -> Decision:
    """What a person's override rests on where the checks could not be made: what was known by then, and that is on
    record.
    """
    overruled = f"The checks could not be made, and were overruled unseen: {error}"
    return Decision(
        "hold",
        [],
        warnings=[overruled, *(error.unseen.warnings if error.unseen else [])],
        anchor=recorded_anchor(registry),
        measurement=measured_under(challenger),
        detectable=error.detectable,
        unseen=error.unseen.to_row() if error.unseen else None,
    )


def explain(
    decision: Decision, sides: Sides, rows: Mapping[str, Any], registry: Registry, champion: Version | None
) -> Decision:
    """The decision with what was compared, and how far; `rows` are of the error budget and the test set."""
    from tasks.tracking.history import first_promotion_note

    first_again = first_promotion_note(registry) if champion is None else None
    return replace(
        decision,
        reasons=[*decision.reasons, *(told for told in (sides.unseen.sentence, first_again) if told)],
        warnings=[*sides.unseen.warnings, *decision.warnings, *warnings_of(rows)],
        measurement=measured_under(sides.measured, sides.opponent.episodes),
        detectable=sides.detectable,
        unseen=sides.unseen.to_row(),
        **rows,
    )


def note_of(sides: Sides) -> dict[str, Any]:
    """What the journal says of whom a decision compared, and on how many problems."""
    return {
        "snapshot": sides.challenger.snapshot,
        "weights": sides.challenger.weights[:12],
        "against": sides.opponent.name,
        "num_problems": sides.challenger.result["num_problems"],
    }


def compare(policy: PromoteSettings, sides: Sides, *, alpha: float) -> Decision:
    """Every check of the policy against the opponent and the anchor, and the verdict that follows. `alpha` is the error
    that the decision may spend.
    """
    from tasks.measurement.statistics import paired_difference, summarise

    challenger, opponent, anchor = sides.challenger, sides.opponent, sides.anchor
    ours, theirs = challenger.trajectories, opponent.trajectories
    checks = judge(
        policy,
        ours,
        theirs,
        alpha=alpha,
        anchor=anchor.anchor if anchor else None,
        snapshot=challenger.snapshot,
        other_name=opponent.name,
    )
    comparison = {
        "against": opponent.name,
        **paired_difference(ours, theirs, confidence=policy.confidence),
        "challenger": result_row(challenger.result),
        "other": result_row(summarise(theirs, confidence=policy.confidence)),
    }
    reasons = [check.sentence for check in checks]
    if opponent.differing_fields:
        shown = listed([shown_name(field) for field in opponent.differing_fields])
        reasons.append(f"The environment differs from the champion's in: {shown}.")
    again = {challenger.snapshot: challenger.measured_again_for, opponent.name: opponent.episodes.differed_in}
    reasons += [
        f"Measured again: {name}, whose episodes were of other {named(why)}." for name, why in again.items() if why
    ]
    row = anchor.to_row(ours, alpha=alpha) if anchor else None
    warnings = [anchor.sentence] if anchor and anchor.sentence else []
    return Decision(
        verdict_of(checks), reasons, comparison, opponent.differing_fields, checks, warnings=warnings, anchor=row
    )


def read_decision_allowance(
    settings: PromoteSections,
    challenger: Challenger,
    champion: Version | None,
    registry: Registry,
    conditions: Conditions,
    override: ManualOverride | None,
    *,
    measured: Challenger | None = None,
    compared: str | None = None,
) -> Allowance:
    """What this decision may spend, by the journal as it is now; `measured` and `compared` once they are known."""
    return read_allowance(
        settings.promote,
        registry,
        holdout_set(conditions.paths),
        challenger=conditions.key(challenger.files),
        evaluation=file_hash((measured or challenger).episodes),
        champion=champion,
        policy=_policy(settings.promote),
        override=override,
        compared=compared,
    )


def episodes_hash(sides: Sides) -> str:
    """SHA-256 of every episode that is compared: the challenger's, the opponent's and the anchor's."""
    anchor = sides.anchor.anchor.trajectories if sides.anchor else []
    compared = (sides.challenger.trajectories, sides.opponent.trajectories, anchor)
    return json_hash([json_hash([item.to_row() for item in side]) for side in compared])


def _policy(options: PromoteSettings) -> dict[str, Any]:
    """The part of the options that a verdict depends on."""
    return options.model_dump(include=set(PolicySettings.model_fields) - {"power"})


def result_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a Result that a comparison shows: success, cost and conduct."""
    names = ("success_rate", "ci_low", "ci_high", "num_problems", "samples_per_problem")
    conduct = ("mean_sampled_tokens", "mean_calls", "invalid_call_share")
    overlong = result["outcomes"]["overlong"]
    return {**{name: result[name] for name in (*names, *conduct)}, "overlong_share": overlong}
