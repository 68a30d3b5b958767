"""A decision: the verdict with its checks and reasons, as decision.json holds it and a terminal shows it.

decision.json is the record: every number and every sentence, also when the answer is no. Who decides is `promote.py`,
what a person may add `orders.py`, what happens in the registry `crown.py`, and the page beside it
`measurement/decision_page.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.measurement.budget_words import budget_text, looks_text
from tasks.measurement.checks import Check
from tasks.measurement.promotion_policy import WAYS, Verdict, verdict_of
from tasks.orders import Order

if TYPE_CHECKING:
    from tasks.console import SafeConsole

Approval = Literal["not_needed", "waiting", "given"]
WAITS = 'It waits for approval: python -m tasks promote --approve --reason "…"'


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to happen, and why.

    `verdict` is what happens: only `promote` moves the champion. `approval: waiting` is a `hold` whose challenger is
    registered under the alias `challenger`. `order` is the person's who forced or approved it. `comparison` is the
    paired difference it rests on, None where none was needed; `differing_fields` are those in which the champion's
    environment was another than the challenger's. `rests_on` is what an approval must find unchanged,
    `unseen` how many test problems were left to compare on, `anchor` the version success may not fall below, and
    whether the challenger would be the next.
    """

    verdict: Verdict
    reasons: list[str]
    comparison: dict[str, Any] | None = None
    differing_fields: Sequence[str] = ()
    checks: Sequence[Check] = ()
    approval: Approval = "not_needed"
    order: Order | None = None
    detectable: Mapping[str, Any] | None = None
    test_set: Mapping[str, Any] | None = None
    error_budget: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()
    rests_on: Mapping[str, Any] | None = None
    unseen: Mapping[str, Any] | None = None
    anchor: Mapping[str, Any] | None = None

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
            "order": asdict(self.order) if self.order else None,
            "detectable_difference": self.detectable,
            "test_set": self.test_set,
            "error_budget": self.error_budget,
            "warnings": list(self.warnings),
            "rests_on": self.rests_on,
            "unseen": self.unseen,
            "anchor": self.anchor,
        }


def approved(row: Mapping[str, Any], order: Order) -> Decision:
    """The decision of a decision.json that waits for approval, approved: the same reasons, and the person's."""
    return Decision(
        "promote",
        [*(reason for reason in row["reasons"] if reason != WAITS), order.sentence],
        row["comparison"],
        row["environment"]["differs_from_champion"],
        [Check(**check) for check in row["checks"]],
        "given",
        order,
        row["detectable_difference"],
        row["test_set"],
        row["error_budget"],
        row["warnings"],
        row["rests_on"],
        row["unseen"],
        row["anchor"],
    )


def carried_out(decision: Decision, order: Order | None, *, needs_approval: bool, stays: str) -> Decision:
    """What happens, given what the policy says: a forced promotion, one that waits for a person, or as it says.

    `stays` is the last sentence where the champion does.
    """
    if order is not None:
        said = [f"The policy says {decision.policy_verdict}."] if decision.checks else []
        return replace(decision, verdict="promote", order=order, reasons=[*decision.reasons, *said, order.sentence])
    if decision.policy_verdict == "promote" and needs_approval:
        return replace(decision, verdict="hold", approval="waiting", reasons=[*decision.reasons, WAITS, stays])
    if decision.policy_verdict == "promote":
        return decision
    return replace(decision, reasons=[*decision.reasons, stays])


def headline(row: Mapping[str, Any]) -> str:
    """What became of the challenger, in one line; `row` is what decision.json holds."""
    snapshot, before, after = row["challenger"]["snapshot"], row["champion_before"], row["champion_after"]
    if row["verdict"] == "promote":
        told = f"{snapshot} is champion: {row['model']}, version {after['version']}"
        return f"{told} (forced)" if row["order"] and row["order"]["kind"] == "force" else told
    if not row["checks"]:
        return str(row["reasons"][0]).rstrip(".")
    reigns = f"version {before['version']} stays champion" if before else "there is still no champion"
    return f"{snapshot} {'waits for approval' if row['approval'] == 'waiting' else 'is not promoted'}; {reigns}"


def print_decision(row: Mapping[str, Any], page: Path, console: SafeConsole, *, kept: str | None = None) -> None:
    """One block for a terminal: the verdict, each check with its mark, what else was said, and where the page is.

    `kept` is when the decision on that page was made, where this run made none.
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
    what = f"The decision of {kept[:10]} that made it champion" if kept else "Every number and reason"
    console.print(f"  {what}: {page}", soft_wrap=True)
