"""promote: the best snapshot against the reigning champion on `test`; an MLflow version with the alias, or a clear no.

Reads what `evaluate` and `train` left, the registry and the environment; writes decision.json and decision.html, which
hold the verdict, the reasons in plain sentences and every number they rest on. Not a DVC stage: it has a side effect.
The policy is `measurement/promotion_policy.py`'s, what a person may add `orders.py`'s, how the champion does on today's
test `champion.py`'s. Left out: the way back, which is `rollback`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tasks.allowance import (
    Allowance,
    OnWorn,
    count_look,
    decide_within,
    hold_for_worn_problems,
    holdout_set,
    read_allowance,
)
from tasks.allowance import rows_of as allowance_rows
from tasks.anchor import FoundAnchor, find_anchor, recorded_anchor
from tasks.challenger import (
    Challenger,
    measured_under,
    read_challenger,
    refuse_another_world,
    todays_conditions,
    under_todays_key,
)
from tasks.champion import Rival, find_rival
from tasks.crown import settle, waiting_version
from tasks.decision import Decision, carried_out
from tasks.decision_files import DECISION_FILE, describe_version, record_outcome
from tasks.detectable import recorded_success, tell_detectable
from tasks.environments.changes import listed, shown_name
from tasks.environments.options import EnvironmentSettings
from tasks.measurement.budget_words import warnings_of
from tasks.measurement.category_checks import refuse_unknown_categories
from tasks.measurement.cost_checks import Anchor
from tasks.measurement.error_budget import ErrorBudgetOptions
from tasks.measurement.promotion_policy import PolicyOptions, judge, verdict_of
from tasks.measurement_key import named
from tasks.orders import Order
from tasks.origin import read_origin
from tasks.pinning import Checked, accepted_changes, check_pin
from tasks.rollouts.options import EngineSettings, SamplingSettings
from tasks.settings import Paths, Settings
from tasks.storage import content_hash
from tasks.tracking.connection import TrackingSettings
from tasks.tracking.names import ModelName, model_uri
from tasks.unseen import unseen_problems

if TYPE_CHECKING:
    from tasks.episodes import Conditions
    from tasks.tracking.registry import Registry, Version


class PromoteOptions(PolicyOptions):
    """The policy, the registered model it is for, and what stands around it.

    `approval`: a person has the last word, until `approval_expires_days` after the decision. `error_budget` bounds how
    often a year of decisions makes a champion wrongly. Problems that were looked at more often than
    `max_looks_per_problem` are worn, and `on_worn` says what then happens: warn says it, refuse decides nothing, rotate
    decides nothing and asks for the next test set in params.yaml. Test problems that either side has learnt from are
    left out; where fewer than `min_unseen_problems` are left, nothing is compared.
    """

    model_name: ModelName
    approval: bool
    approval_expires_days: int = Field(ge=1)
    error_budget: ErrorBudgetOptions
    max_looks_per_problem: int = Field(ge=1)
    on_worn: OnWorn
    min_unseen_problems: int = Field(ge=1)


class PromoteSettings(Settings):
    """The sections of params.yaml that `promote` reads."""

    seed: int
    num_threads: int = Field(ge=1)
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings
    promote: PromoteOptions
    tracking: TrackingSettings


SETTINGS = PromoteSettings


def run(settings: PromoteSettings, paths: Paths, order: Order | None = None) -> None:
    """Decide, act on the registry (`crown.py`), then write decision.json: it never announces what did not happen."""
    from tasks.environments.catalog import load_environment

    challenger = read_challenger(paths, num_threads=settings.num_threads)
    checked = check_pin(settings.environment, paths, stage="promote")
    origin = read_origin(paths)
    with closing(load_environment(settings.environment)) as environment:
        refuse_another_world(paths, challenger, environment.fingerprint(), checked)
        conditions = todays_conditions(settings, paths, challenger, environment, checked)

        def decide_and_count(champion: Version | None, registry: Registry) -> tuple[Decision, Challenger]:
            decision, measured = decide(settings, challenger, champion, registry, conditions, order)
            key = conditions.key(challenger.files)
            return count_look(decision, registry, holdout_set(paths), evaluation=key), measured

        row, version, after = settle(
            settings.tracking,
            settings.promote.model_name,
            challenger,
            conditions,
            origin,
            record=paths.stage("promote") / DECISION_FILE,
            decide=decide_and_count,
            describe=lambda decision, measured, champion: decision_row(
                settings, paths, measured, checked, decision, champion
            ),
        )
    record_outcome(paths, row, version, after)


def decide(
    settings: PromoteSettings,
    challenger: Challenger,
    champion: Version | None,
    registry: Registry,
    conditions: Conditions,
    order: Order | None = None,
) -> tuple[Decision, Challenger]:
    """The policy's verdict, and what a person's order or missing approval makes of it; and the challenger with the
    episodes it was made on. Counts as a look at `test`.

    Either side is measured only where its numbers are needed and no kept ones are of today's key.
    """
    from tasks.tracking.succession import why_first_again, why_held, why_rolled_back
    from tasks.tracking.waiting import find_waiting, why_withdrawn

    paths = conditions.paths
    stays = f"The champion, version {champion.version}, stays." if champion else "There is still no champion."
    if champion is not None and champion.identity == challenger.files:
        reason = f"{challenger.snapshot} is already champion: version {champion.version} holds the same model."
        why = f"What made it champion: python -m tasks lineage {model_uri(settings.promote.model_name, '@champion')}"
        return Decision("hold", [reason, why]), challenger
    waiting = find_waiting(registry)
    if order is None and waiting is not None and waiting_version(registry, challenger.files):
        return Decision("hold", [waiting.sentence, stays], approval="waiting"), challenger
    taken_back = (why_rolled_back, why_withdrawn)  # by a person, whom no schedule overrules
    closed = [why_held(registry), *(why(registry, challenger.weights) for why in taken_back if order is None)]
    if any(closed):
        return Decision("hold", [*filter(None, closed), stays]), challenger
    refuse_unknown_categories(settings.promote.categories, {item.category for item in challenger.trajectories})
    read = partial(read_decision_allowance, settings, challenger, champion, registry, conditions, order)
    allowance = read()
    held = hold_for_worn_problems(settings.promote, allowance, paths)
    if held:
        return replace(held, reasons=[*held.reasons, stays]), challenger
    detectable, unseen = None, None
    try:
        side, minimum = (challenger.snapshot, challenger.folder), settings.promote.min_unseen_problems
        unseen = unseen_problems(paths, side, champion, registry, minimum=minimum)
        confidence = settings.promote.confidence
        compared = challenger.on(unseen, confidence=confidence)
        success = recorded_success(paths, challenger, champion)
        detectable = tell_detectable(settings.promote, compared, rival_success=success, alpha=allowance.alpha)
        challenger = under_todays_key(challenger, conditions)
        compared = challenger.on(unseen, confidence=confidence)
        rival = find_rival(challenger, champion, registry, conditions).on(unseen)
        anchor = None
        if champion is not None:
            anchor = find_anchor(
                registry,
                champion,
                Anchor(rival.name, rival.trajectories),
                play=lambda version: find_rival(challenger, version, registry, conditions).on(unseen).trajectories,
            )
    except ValueError as error:
        if order is None:
            raise
        overruled = f"The checks could not be made, and were overruled unseen: {error}"
        measured = measured_under(challenger)
        decision = Decision("hold", [], warnings=[overruled], anchor=recorded_anchor(registry), measurement=measured)
    else:
        decision, allowance = decide_within(
            allowance,
            registry,
            refresh=read,
            judge=lambda allowed: compare(settings.promote, compared, rival, anchor, alpha=allowed.alpha),
            note=note_of(compared, rival),
        )
        first_again = why_first_again(registry) if champion is None else None
        reasons = [*decision.reasons, *(told for told in (unseen.sentence, first_again) if told)]
        rows = allowance_rows(settings.promote, allowance, registry)
        warnings = [*decision.warnings, *warnings_of(rows)]
        measured = measured_under(challenger, rival.episodes)
        decision = replace(decision, reasons=reasons, warnings=warnings, measurement=measured, **rows)
    unknown = unseen.warnings if unseen else []
    warnings = [*([challenger.untrained] if challenger.untrained else []), *unknown, *decision.warnings]
    row = unseen.to_row() if unseen else None
    decision = replace(decision, detectable=detectable, warnings=warnings, unseen=row)
    approve_until = datetime.now(UTC) + timedelta(days=settings.promote.approval_expires_days)
    decision = carried_out(
        decision, order, approve_until=approve_until if settings.promote.approval else None, stays=stays
    )
    waits_on = waiting is not None and decision.verdict != "promote" and decision.approval == "not_needed"
    warnings = [*decision.warnings, *([waiting.sentence] if waiting and waits_on else [])]
    return replace(decision, warnings=warnings), challenger


def note_of(compared: Challenger, rival: Rival) -> dict[str, Any]:
    """What the journal says of whom a decision compared, and on how many problems."""
    return {
        "snapshot": compared.snapshot,
        "weights": compared.weights[:12],
        "against": rival.name,
        "num_problems": compared.result["num_problems"],
    }


def compare(
    policy: PromoteOptions, challenger: Challenger, rival: Rival, anchor: FoundAnchor | None, *, alpha: float
) -> Decision:
    """Every check of the policy against `rival` and the `anchor`, and the verdict that follows. `alpha` is the error
    that the decision may spend.
    """
    from tasks.measurement.statistics import paired_difference, summarise

    ours, theirs = challenger.trajectories, rival.trajectories
    checks = judge(
        policy,
        ours,
        theirs,
        alpha=alpha,
        anchor=anchor.anchor if anchor else None,
        snapshot=challenger.snapshot,
        other_name=rival.name,
    )
    comparison = {
        "against": rival.name,
        **paired_difference(ours, theirs, confidence=policy.confidence),
        "challenger": result_row(challenger.result),
        "other": result_row(summarise(theirs, confidence=policy.confidence)),
    }
    reasons = [check.sentence for check in checks]
    if rival.differing_fields:
        shown = listed([shown_name(field) for field in rival.differing_fields])
        reasons.append(f"The environment differs from the champion's in: {shown}.")
    again = {challenger.snapshot: challenger.measured_again_for, rival.name: rival.episodes.differed_in}
    reasons += [
        f"Measured again: {name}, whose episodes were of other {named(why)}." for name, why in again.items() if why
    ]
    row = anchor.to_row(ours, alpha=alpha) if anchor else None
    warnings = [anchor.sentence] if anchor and anchor.sentence else []
    return Decision(
        verdict_of(checks), reasons, comparison, rival.differing_fields, checks, warnings=warnings, anchor=row
    )


def read_decision_allowance(
    settings: PromoteSettings,
    challenger: Challenger,
    champion: Version | None,
    registry: Registry,
    conditions: Conditions,
    order: Order | None,
) -> Allowance:
    """What this decision may spend, by the journal as it is now."""
    return read_allowance(
        settings.promote,
        registry,
        holdout_set(conditions.paths),
        evaluation=conditions.key(challenger.files),
        champion=champion,
        policy=_policy(settings.promote),
        order=order,
    )


def decision_row(
    settings: PromoteSettings,
    paths: Paths,
    challenger: Challenger,
    checked: Checked,
    decision: Decision,
    before: Version | None,
) -> dict[str, Any]:
    """The verdict, why, every number used, and the champion before; what the registry keeps with a version."""
    return {
        **decision.to_row(),
        "decided_at": now(),
        "model": settings.promote.model_name,
        "challenger": {
            "snapshot": challenger.snapshot,
            "weights": challenger.weights,
            "files": challenger.files,
            # Of a LoRA adapter: before it was merged.
            "evaluated": challenger.evaluation["weights"]["best"],
            "evaluated_files": challenger.evaluation["folders"]["best"],
        },
        "policy": settings.promote.model_dump(exclude={"model_name"}),
        "test": challenger.evaluation["test"],
        "select": challenger.evaluation["select"][challenger.snapshot],
        "environment": {
            "fingerprint": checked.fingerprint,
            "accepted_drift": accepted_changes(paths),
            "differs_from_champion": list(decision.differing_fields),
        },
        "champion_before": describe_version(before),
    }


def hash_of_test(paths: Paths) -> str:
    """SHA-256 of the test problems, as the data card and a version's lineage name it."""
    return content_hash(paths.split("test"))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")  # in seconds, two decisions could be of one moment


def _policy(options: PromoteOptions) -> dict[str, Any]:
    """The part of the options that a verdict depends on."""
    return options.model_dump(include=set(PolicyOptions.model_fields) - {"power"})


def result_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a Result that a comparison shows: success, cost and conduct."""
    names = ("success_rate", "ci_low", "ci_high", "num_problems", "samples_per_problem")
    conduct = ("mean_sampled_tokens", "mean_calls", "invalid_call_share")
    overlong = result["outcomes"]["overlong"]
    return {**{name: result[name] for name in (*names, *conduct)}, "overlong_share": overlong}
