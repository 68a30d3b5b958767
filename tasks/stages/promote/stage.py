"""promote: compare the best snapshot with the champion on `test`, then make it champion or explain why not.

Reads the results of `evaluate` and `train`, the registry and the environment; writes decision.json and decision.html.
It is no DVC stage, since it moves the registry's aliases. README.md here explains the policy.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tasks.core.settings import Paths
from tasks.drift.pin import check_pin
from tasks.stages.evaluate.measurement_key import key_parts
from tasks.stages.promote.allowance import allowance_rows, count_looks, hold_for_holdout_reuse, read_allowance, spend
from tasks.stages.promote.challenger import (
    Challenger,
    merged_folder,
    read_challenger,
    refuse_another_environment,
    todays_play,
)
from tasks.stages.promote.comparison import (
    NotComparable,
    compare,
    describe_comparison,
    describe_unmeasured,
    measure_both_sides,
)
from tasks.stages.promote.decision import Decision, apply_override
from tasks.stages.promote.episodes import Conditions
from tasks.stages.promote.origin import read_origin
from tasks.stages.promote.overrides import ANSWER_HOURS, ManualOverride
from tasks.stages.promote.publish import find_unrecorded_decision, publish
from tasks.stages.promote.record import decision_row, record_outcome
from tasks.stages.promote.settings import PromoteSections, PromoteSettings
from tasks.tracking.settings import model_uri

if TYPE_CHECKING:
    from tasks.tracking.versions import Version
    from tasks.tracking.waiting import Waiting

SETTINGS = PromoteSections


def run(settings: PromoteSections, paths: Paths, override: ManualOverride | None = None) -> None:
    try:
        promote(settings, paths, override)
    finally:
        shutil.rmtree(merged_folder(paths), ignore_errors=True)


def promote(settings: PromoteSections, paths: Paths, override: ManualOverride | None) -> None:
    """Decide, publish, then write decision.json last, so that it never announces what did not happen."""
    from tasks.environments.catalog import load_environment
    from tasks.tracking.aliases import current_champion, open_registry
    from tasks.tracking.journal import read_journal
    from tasks.tracking.waiting import end_stale_waiting, waiting_in

    challenger = read_challenger(paths, compute=settings.compute)
    drift = check_pin(settings.environment, paths, stage="promote")
    origin = read_origin(paths)
    with closing(load_environment(settings.environment)) as environment:
        refuse_another_environment(paths, challenger, environment.fingerprint(), drift)
        registry = open_registry(settings.tracking, settings.promote.model_name)
        champion = current_champion(registry)
        registry.make_model()
        end_stale_waiting(registry, champion)

        play = todays_play(settings, challenger)
        parts = key_parts(play, paths, settings.environment, drift)
        conditions = Conditions(paths, environment, registry, champion, read_journal(registry), play, parts)
        unrecorded = find_unrecorded_decision(challenger, conditions)
        if unrecorded is not None:
            record_outcome(paths, unrecorded, champion, champion)
            return

        count_looks(registry, paths, challenger)
        waiting = waiting_in(conditions.journal.entries)
        decision = hold_without_comparing(settings.promote, challenger, conditions, waiting, override)
        if decision is None:
            decision, challenger = decide(settings.promote, challenger, conditions, override)
        decision = add_remarks(decision, challenger, champion, waiting)

        row = decision_row(settings.promote, decision, challenger, conditions, drift)
        version = registry.find(challenger.files)
        if decision.kind == "promote" or decision.expires is not None:
            version = publish(paths, challenger, registry, environment, origin, decision=row, instead_of=champion)
    record_outcome(paths, row, version, version if decision.kind == "promote" else champion)


def hold_without_comparing(
    settings: PromoteSettings,
    challenger: Challenger,
    conditions: Conditions,
    waiting: Waiting | None,
    override: ManualOverride | None,
) -> Decision | None:
    """A decision to hold where the challenger already is champion or waits, or where a person holds promotions or took
    this model back; else None. ValueError for an override while promotions are held.
    """
    from tasks.tracking.history import hold_note, refuse_held, rollback_note, summarise_journal
    from tasks.tracking.waiting import still_waits, withdrawal_note

    registry, champion = conditions.registry, conditions.champion
    if champion is not None and champion.identity == challenger.files:
        reason = f"{challenger.snapshot} is already champion: version {champion.version} is the same model."
        why = f"What made it champion: python -m tasks lineage {model_uri(settings.model_name, '@champion')}"
        return Decision("hold", [reason, why])
    if override is not None:
        refuse_held(registry)  # a person's request that is refused is an error
        return None
    if waiting is not None and still_waits(registry, waiting, challenger.files):
        return Decision("hold", [waiting.sentence], approval="waiting")
    history, weights = summarise_journal(conditions.journal.entries), challenger.weights
    rolled_back, withdrawn = rollback_note(history, registry, weights), withdrawal_note(conditions.journal, weights)
    reasons = [note for note in (hold_note(history), rolled_back, withdrawn) if note]
    return Decision("hold", reasons) if reasons else None


def decide(
    settings: PromoteSettings, challenger: Challenger, conditions: Conditions, override: ManualOverride | None
) -> tuple[Decision, Challenger]:
    """The decision of policy and person, and the challenger with the episodes it was made on."""
    allowance = read_allowance(settings, challenger, conditions, override)
    held = hold_for_holdout_reuse(settings, allowance, conditions.paths)
    if held:
        return held, challenger
    try:
        comparison = measure_both_sides(settings, challenger, conditions, alpha=allowance.alpha)
    except NotComparable as error:
        if override is None:
            raise
        return apply_override(describe_unmeasured(challenger, conditions, error), override, None), challenger

    challenger, compared = comparison.measured, comparison.episodes_hash
    while True:  # until no other decision was recorded since the allowance was read
        allowance = read_allowance(settings, challenger, conditions, override, compared=compared)
        held = hold_for_holdout_reuse(settings, allowance, conditions.paths)  # with the episodes known it may be new
        if held:
            return held, challenger
        decision = compare(settings, comparison, alpha=allowance.alpha)
        past = spend(allowance, decision, conditions.registry, note=comparison.note)
        if past is not None:
            break

    rows = allowance_rows(settings, allowance, past)
    decision = describe_comparison(decision, comparison, rows, conditions)
    approve_until = datetime.now(UTC) + time_to_approve(settings) if settings.approval else None
    return apply_override(decision, override, approve_until), challenger


def time_to_approve(settings: PromoteSettings) -> timedelta:
    """Until a decision that waits expires: also by when the flow that waits for it ends it."""
    return timedelta(hours=min(24 * settings.approval_expires_days, float(os.environ.get(ANSWER_HOURS, "inf"))))


def add_remarks(
    decision: Decision, challenger: Challenger, champion: Version | None, waiting: Waiting | None
) -> Decision:
    """The decision with what happens to the champion, and warnings."""
    if decision.kind == "promote":
        reasons, waits = decision.reasons, []
    else:
        stays = f"The champion, version {champion.version}, stays." if champion else "There is still no champion."
        reasons = [*decision.reasons, stays]
        waits = [waiting.sentence] if waiting and decision.approval == "not_needed" else []
    learnt = [said for said in (challenger.untrained, challenger.by_heart) if said]
    return replace(decision, reasons=reasons, warnings=[*learnt, *decision.warnings, *waits])
