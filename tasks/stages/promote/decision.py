"""A decision: the verdict with its checks and reasons, as decision.json holds it and a terminal shows it.

decision.json is the record: every number and every sentence, also when the answer is no. Who decides is
`promote/stage.py`, what a person may add `overrides.py`, what happens in the registry `publish.py`, and the page beside
it `measurement/decision_page.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.stages.promote.budget_words import budget_text, looks_text
from tasks.stages.promote.checks.check import Check
from tasks.stages.promote.overrides import ManualOverride
from tasks.stages.promote.policy import WAYS, Verdict, verdict_of

if TYPE_CHECKING:
    from tasks.core.console import SafeConsole

Approval = Literal["not_needed", "waiting", "given"]
WAITS = "It waits for approval"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to happen, and why.

    `verdict` is what happens: only `promote` moves the champion. `approval: waiting` is a `hold` whose challenger is
    registered under the alias `challenger`. `override` is the person's who forced or approved it. `comparison` is the
    paired difference it rests on, None where none was needed; `differing_fields` are those in which the champion's
    environment was another than the challenger's. A decision that waits `expires` at a time of day; one that waited
    before already, and is not made again, has none. `unseen` is how many test problems were left to compare on,
    `anchor` the version success may not fall below, and whether the challenger would be the next, `measurement` what
    both sides' episodes were made under.
    """

    verdict: Verdict
    reasons: list[str]
    comparison: dict[str, Any] | None = None
    differing_fields: Sequence[str] = ()
    checks: Sequence[Check] = ()
    approval: Approval = "not_needed"
    override: ManualOverride | None = None
    detectable: Mapping[str, Any] | None = None
    test_set: Mapping[str, Any] | None = None
    error_budget: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()
    expires: str | None = None
    unseen: Mapping[str, Any] | None = None
    anchor: Mapping[str, Any] | None = None
    measurement: Mapping[str, Any] | None = None

    @property
    def policy_verdict(self) -> Verdict:
        """What the checks say, whatever a person ordered or has yet to approve; without checks nothing is promoted."""
        return verdict_of(self.checks) if self.checks else "hold"

    def to_row(self) -> dict[str, Any]:
        """Its part of decision.json."""
        return {
            "verdict": self.verdict,
            "policy_verdict": self.policy_verdict,
            "reasons": self.reasons,
            "comparison": self.comparison,
            "checks": [check.to_row() for check in self.checks],
            "approval": self.approval,
            "override": override_row(self.override),
            "detectable_difference": self.detectable,
            "test_set": self.test_set,
            "error_budget": self.error_budget,
            "warnings": list(self.warnings),
            "expires": self.expires,
            "unseen": self.unseen,
            "anchor": self.anchor,
            "measurement": self.measurement,
        }


def approved(row: Mapping[str, Any], override: ManualOverride) -> dict[str, Any]:
    """What decision.json holds after its approval: all that it held, and the person's word."""
    reasons = [*takewhile(lambda reason: not reason.startswith(WAITS), row["reasons"]), override.sentence]
    return {**row, "verdict": "promote", "approval": "given", "override": override_row(override), "reasons": reasons}


def override_row(override: ManualOverride | None) -> dict[str, Any] | None:
    return {name: value for name, value in asdict(override).items() if value is not None} if override else None


def carried_out(
    decision: Decision, override: ManualOverride | None, *, approve_until: datetime | None, stays: str
) -> Decision:
    """What happens, given what the policy says: a forced promotion, one that waits for a person, or as it says.

    `approve_until` is when an approval expires, None where none is needed; `stays` the last sentence where the champion
    does.
    """
    if override is not None:
        said = [f"The policy says {decision.policy_verdict}."] if decision.checks else []
        return replace(
            decision, verdict="promote", override=override, reasons=[*decision.reasons, *said, override.sentence]
        )
    if decision.policy_verdict == "promote" and approve_until:
        told = f'{WAITS} until {approve_until:%Y-%m-%d %H:%M} UTC: python -m tasks promote --approve --reason "…"'
        expires, reasons = approve_until.isoformat(timespec="seconds"), [*decision.reasons, told, stays]
        return replace(decision, verdict="hold", approval="waiting", reasons=reasons, expires=expires)
    if decision.policy_verdict == "promote":
        return decision
    return replace(decision, reasons=[*decision.reasons, stays])


def headline(row: Mapping[str, Any]) -> str:
    """What became of the challenger, in one line; `row` is what decision.json holds."""
    snapshot, before, after = row["challenger"]["snapshot"], row["champion_before"], row["champion_after"]
    if row["verdict"] == "promote":
        told = f"{snapshot} is champion: {row['model']}, version {after['version']}"
        return f"{told} (forced)" if row["override"] and row["override"]["kind"] == "force" else told
    if not row["checks"]:
        return str(row["reasons"][0]).rstrip(".")
    reigns = f"version {before['version']} stays champion" if before else "there is still no champion"
    return f"{snapshot} {'waits for approval' if row['approval'] == 'waiting' else 'is not promoted'}; {reigns}"


def print_decision(row: Mapping[str, Any], page: Path, console: SafeConsole, *, kept: str | None = None) -> None:
    """One block for a terminal: the verdict, each check with its mark, what else was said, and where the page is.

    `kept` is what that page is, where this run made no decision.
    """
    from rich.table import Table
    from rich.text import Text

    tones = {"promote": "bold green", "hold": "bold yellow", "reject": "bold red"}
    console.print(Text.assemble((f"{row['verdict']}: ", tones[row["verdict"]]), headline(row)), soft_wrap=True)
    lines = Table.grid(padding=(0, 1))
    way_is_open = any(check["passed"] for check in row["checks"] if check["name"] in WAYS)
    for check in row["checks"]:
        is_needless = check["name"] in WAYS and way_is_open and not check["passed"]
        mark = Text("✓", "green") if check["passed"] else Text("–", "dim") if is_needless else Text("✗", "red")
        lines.add_row(" ", mark, check["sentence"])
    told = {check["sentence"] for check in row["checks"]}
    for reason in (reason for reason in row["reasons"] if row["checks"] and reason not in told):
        lines.add_row(" ", "·", reason)
    if row["test_set"]:
        lines.add_row(" ", "·", looks_text(row["test_set"]))
        lines.add_row(" ", "·", budget_text(row["error_budget"]))
    for warning in row["warnings"]:
        lines.add_row(" ", Text("!", "yellow"), warning)
    if lines.row_count:
        console.print(lines)
    console.print(f"  {kept or 'Every number and reason'}: {page}", soft_wrap=True)
