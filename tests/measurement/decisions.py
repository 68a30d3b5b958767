"""Made-up decisions as decision.json holds them, for the tests of the page: one for each way a decision can end."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tasks.core.records import Trajectory
from tasks.measurement.statistics import paired_difference, summarise
from tasks.stages.promote.checks.cost import Anchor
from tasks.stages.promote.comparison import result_row
from tasks.stages.promote.decision import Decision, apply_override
from tasks.stages.promote.overrides import ManualOverride
from tasks.stages.promote.policy import check_all, decision_of
from tasks.stages.promote.settings import PolicySettings
from tests.measurement.hostile import HANDLER, SCRIPT
from tests.measurement.synthetic import trajectory

NAMED = "book/declined"
POLICY = PolicySettings.model_validate(
    {
        "minimum_success": 0.6,
        "confidence": 0.95,
        "or_cheaper": {"measure": "calls", "max_success_loss": 0.02, "min_saving": 0.1},
        "max_cost_increase": {"measure": "calls", "share": 0.5},
        "categories": {"max_loss": 0.05, "false_alarm": 0.2, "never_fall": [NAMED]},
        "max_extra_lost_share": 0.01,
        "max_invalid_call_share": 0.1,
        "max_overlong_share": 0.1,
        "power": 0.8,
    }
)
CATEGORIES = (NAMED, "quote/timeout/get_nearest_airport_by_city", f"hostile {SCRIPT}{HANDLER}")
HOSTILE_REASON = f"incident 4711 {SCRIPT} {HANDLER}"

UNTIL = datetime(2026, 11, 28, 21, 40, tzinfo=UTC)


def play(num_successes: int) -> list[Trajectory]:
    """Fifty problems a category, so many of them solved; the last category is solved less."""
    shares = dict.fromkeys(CATEGORIES, num_successes) | {CATEGORIES[-1]: max(0, num_successes - 10)}
    return [
        trajectory(f"{category}-{number}", number < shares[category], category=category)
        for category in CATEGORIES
        for number in range(50)
    ]


def decision_row(
    ours: int,
    theirs: int,
    *,
    override: ManualOverride | None = None,
    needs_approval: bool = False,
    num_decisions: int = 1,
) -> dict[str, Any]:
    """A challenger that solves `ours` of 50 problems a category against a champion that solves `theirs`."""
    sides = play(ours), play(theirs)
    anchor = Anchor("version 2, champion before", sides[1])
    checks = check_all(
        POLICY, *sides, alpha=0.025, anchor=anchor, snapshot="iteration-0010", other_name="the champion, version 3"
    )
    results = [result_row({**summarise(side, confidence=0.95)}) for side in sides]
    comparison = {
        "against": "the champion, version 3",
        **paired_difference(*sides, confidence=0.95),
        "challenger": results[0],
        "other": results[1],
    }
    note = {"decided_at": "2026-11-20T10:00:00+00:00", "snapshot": "iteration-0010", "weights": "c2c2"}
    decisions = [
        {**note, "against": "the champion, version 3", "policy_decision": "hold", "alpha": 0.001}
    ] * num_decisions
    decision = Decision(
        decision_of(checks),
        [check.sentence for check in checks],
        comparison,
        ["world"],
        checks,
        detectable_difference={
            "difference": 0.12,
            "num_problems": 150,
            "samples_per_problem": 1,
            "num_groups": 97,
            "success_rate": 0.91,
            "alpha": 0.025,
            "power": 0.8,
        },
        test_set={
            "hash": "e66967bbf969ab5f",
            "num_problems": 150,
            "most_looks": num_decisions,
            "median_looks": num_decisions,
            "max_looks": 2,
            "num_decisions": num_decisions,
            "is_new_decision": True,
            "decisions": decisions,
        },
        error_budget={
            "per_year": 0.1,
            "window_days": 365,
            "share": 0.001,
            "this_decision": 0.001,
            "is_spent_anew": True,
            "spent": 0.001 * num_decisions,
            "left": 0.1 - 0.001 * num_decisions,
            "num_decisions": num_decisions,
            "renews_at": "2027-11-20T10:00:00+00:00",
            "kind": "against the champion",
            "planned": 100,
        },
        anchor={"name": anchor.name, "version": 2, "success_rate": results[1]["success_rate"], "is_next": False},
        warnings=["This test set is worn."] if num_decisions > 2 else [],
    )
    decision = apply_override(decision, override, UNTIL if needs_approval else None)
    if decision.kind != "promote":
        decision = replace(decision, reasons=[*decision.reasons, "The champion, version 3, stays."])
    return {**around(), **decision.to_row(), "champion_after": champion(4 if decision.kind == "promote" else 3)}


def already_champion() -> dict[str, Any]:
    """Nothing was compared."""
    decision = Decision("hold", ["iteration-0010 is already champion: version 3 holds the same weights."])
    return {**around(), **decision.to_row(), "champion_after": champion(3)}


def champion(version: int) -> dict[str, Any]:
    return {"version": version, "weights": f"{version}d" * 32, "lineage": {}}


def around() -> dict[str, Any]:
    """What decision.json holds around a decision."""
    return {
        "decided_at": "2026-11-21T21:40:05+00:00",
        "model": "travel-desk-agent",
        "challenger": {"snapshot": "iteration-0010", "weights": "c2" * 32},
        "policy": {
            **POLICY.model_dump(),
            "approval": False,
            "max_looks_per_problem": 2,
            "min_unseen_problems": 1,
        },
        "environment": {"fingerprint": "f00d", "accepted_drift": [f"{SCRIPT} → 2"], "differs_from_champion": ["world"]},
        "champion_before": champion(3),
    }


ROWS = {
    "promote": decision_row(49, 30),
    "hold": decision_row(40, 40),
    "reject": decision_row(30, 49, num_decisions=3),
    "forced": decision_row(30, 49, override=ManualOverride("force", HOSTILE_REASON)),
    "waiting": decision_row(49, 30, needs_approval=True),
    "already champion": already_champion(),
}
