"""A decision to promote, hold or reject, with its checks and reasons, and with a person's approval or override."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from typing import Any, Literal

from tasks.core.records import DecisionKind
from tasks.stages.promote.checks.check import Check
from tasks.stages.promote.overrides import ManualOverride
from tasks.stages.promote.policy import decision_of
from tasks.tracking.waiting import HOW

Approval = Literal["not_needed", "waiting", "given", "withdrawn"]
WAITS = "It waits for approval"


@dataclass(frozen=True, slots=True)
class Decision:
    """`kind` is what happens: only `promote` moves the champion. `approval: waiting` is a `hold` whose challenger gets
    the alias `challenger` until it `expires`; one that already waited has no such time. `comparison` is the paired
    difference, None where nothing was compared. `differing_fields` are the parts of the environment that differed for
    the champion. `unseen` counts the test problems compared on, `anchor` is the version success may not fall below,
    `measurement` the conditions of both sides' episodes.
    """

    kind: DecisionKind
    reasons: list[str]
    comparison: dict[str, Any] | None = None
    differing_fields: Sequence[str] = ()
    checks: Sequence[Check] = ()
    approval: Approval = "not_needed"
    override: ManualOverride | None = None
    detectable_difference: Mapping[str, Any] | None = None
    test_set: Mapping[str, Any] | None = None
    error_budget: Mapping[str, Any] | None = None
    warnings: Sequence[str] = field(default_factory=list)
    expires: str | None = None
    unseen: Mapping[str, Any] | None = None
    anchor: Mapping[str, Any] | None = None
    measurement: Mapping[str, Any] | None = None

    @property
    def by_policy(self) -> DecisionKind:
        """What the checks decide, whatever a person overrides or has yet to approve: `hold` without checks."""
        return decision_of(self.checks) if self.checks else "hold"

    def to_row(self) -> dict[str, Any]:
        row = asdict(replace(self, override=None))
        del row["differing_fields"]
        override = override_row(self.override)
        return {"decision": row.pop("kind"), "policy_decision": self.by_policy, **row, "override": override}


def apply_override(decision: Decision, override: ManualOverride | None, approve_until: datetime | None) -> Decision:
    """The policy's decision, a forced promotion, or one that waits for a person until `approve_until` (None: no
    approval).
    """
    if override is not None:
        by_policy = [f"The policy says {decision.by_policy}."] if decision.checks else []
        reasons = [*decision.reasons, *by_policy, override.sentence]
        return replace(decision, kind="promote", override=override, reasons=reasons)
    if decision.by_policy != "promote" or approve_until is None:
        return decision
    waits = f"{WAITS} until {approve_until:%Y-%m-%d %H:%M} UTC: {HOW}"
    expires = approve_until.isoformat(timespec="seconds")
    return replace(decision, kind="hold", approval="waiting", reasons=[*decision.reasons, waits], expires=expires)


def approve_row(row: Mapping[str, Any], override: ManualOverride) -> dict[str, Any]:
    reasons = [*takewhile(lambda reason: not reason.startswith(WAITS), row["reasons"]), override.sentence]
    return {
        **row, "decision": "promote", "approval": "given", "override": override_row(override), "reasons": reasons,
    }  # fmt: skip


def withdraw_row(row: Mapping[str, Any], sentence: str) -> dict[str, Any]:
    """`sentence`: by whom or what it ended unapproved."""
    reasons = [sentence if reason.startswith(WAITS) else reason for reason in row["reasons"]]
    return {**row, "approval": "withdrawn", "reasons": reasons}


def override_row(override: ManualOverride | None) -> dict[str, Any] | None:
    return {name: value for name, value in asdict(override).items() if value is not None} if override else None


def remarks_of(row: Mapping[str, Any]) -> list[str]:
    """The reasons that are neither a check's sentence nor the person's, which are shown elsewhere."""
    shown = {check["sentence"] for check in row["checks"]}
    if row["override"]:
        shown.add(ManualOverride(**row["override"]).sentence)
    return [reason for reason in row["reasons"] if reason not in shown]
