"""Writes artifacts/promote and prints the result.

`decision.json` and `decision.html` are of the last real decision: a run whose challenger already is champion or waits
leaves them. `outcome.json` is always of this run; MLflow runs are tagged with it. A person's answer changes all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_json, write_json, write_text
from tasks.core.settings import Paths
from tasks.core.workspace import as_shell_sees
from tasks.drift.pin import DriftCheck, accepted_changes
from tasks.report.marks import SIGNS, marks_of
from tasks.stages.promote.challenger import Challenger
from tasks.stages.promote.decision import Decision, remarks_of
from tasks.stages.promote.error_budget import budget_text, looks_text
from tasks.stages.promote.overrides import ManualOverride
from tasks.tracking.versions import DECISION_FILE

if TYPE_CHECKING:
    from tasks.core.console import SafeConsole
    from tasks.stages.promote.episodes import Conditions
    from tasks.stages.promote.settings import PromoteSettings
    from tasks.tracking.versions import Version

PAGE_FILE, OUTCOME_FILE = "decision.html", "outcome.json"


def decision_row(
    settings: PromoteSettings,
    decision: Decision,
    challenger: Challenger,
    conditions: Conditions,
    drift: DriftCheck,
) -> dict[str, Any]:
    """decision.json without the champion after it; the registry keeps it with a version."""
    evaluation = challenger.evaluation
    return {
        **decision.to_row(),
        # In milliseconds: of one second there may be two decisions.
        "decided_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "model": settings.model_name,
        "challenger": {
            "snapshot": challenger.snapshot,
            "weights": challenger.weights,
            "files": challenger.files,
            # Of a LoRA adapter: before it was merged.
            "evaluated": evaluation["weights"]["best"],
            "evaluated_files": evaluation["folders"]["best"],
        },
        "policy": settings.model_dump(exclude={"model_name"}),
        "test": evaluation["test"],
        "select": evaluation["select"][challenger.snapshot],
        **({"also": evaluation["also"]} if "also" in evaluation else {}),
        "environment": {
            "fingerprint": drift.fingerprint,
            "accepted_drift": accepted_changes(conditions.paths),
            "differs_from_champion": list(decision.differing_fields),
        },
        "champion_before": describe_version(conditions.champion),
    }


def describe_version(version: Version | None) -> dict[str, Any] | None:
    if version is None:
        return None
    return {"version": version.version, "weights": version.weights, "files": version.identity, "lineage": version.tags}


def record_outcome(paths: Paths, row: Mapping[str, Any], version: Version | None, after: Version | None) -> None:
    """Write and print the outcome. `row` is decision.json so far, `version` the challenger's if registered, `after` the
    champion now.
    """
    from tasks.core.console import SafeConsole

    folder = paths.stage("promote")
    is_champion = after is not None and after.identity == row["challenger"]["files"]
    whole = {**row, "champion_after": describe_version(after), "is_champion": is_champion}
    kept = _describe_kept_decision(row, after, folder)
    if kept is None:
        write_decision(paths, whole)
    write_outcome(paths, whole, version.version if version else None)
    print_decision(whole, folder / PAGE_FILE, SafeConsole(), kept=kept)


def write_outcome(paths: Paths, whole: Mapping[str, Any], version: int | None) -> None:
    """`whole` is decision.json, `version` the challenger's if registered."""
    outcome = {
        "decision": whole["decision"],
        "policy_decision": whole["policy_decision"],
        "approval": whole["approval"],
        "snapshot": whole["challenger"]["snapshot"],
        "weights": whole["challenger"]["weights"][:12],
        "registered_model": whole["model"],
        "registered_version": version,
        "champion": (whole["champion_after"] or {}).get("version"),
        "decided_at": whole["decided_at"],
    }
    write_json(paths.stage("promote") / OUTCOME_FILE, outcome)


def write_decision(paths: Paths, whole: Mapping[str, Any]) -> None:
    """decision.html, then decision.json: so where the second exists, the first is of the same decision."""
    from tasks.stages.promote.page import render_decision

    write_text(paths.stage("promote") / PAGE_FILE, render_decision(whole, headline(whole)))
    write_json(paths.stage("promote") / DECISION_FILE, dict(whole))


def _describe_kept_decision(row: Mapping[str, Any], champion: Version | None, folder: Path) -> str | None:
    """The decision on file that made this challenger champion or by which it waits, where `row` decided nothing new.
    None where `row` is to replace it.
    """
    file = folder / DECISION_FILE
    if row["decision"] == "promote" or row["checks"] or not file.exists():
        return None
    try:
        decision = read_json(file)
    except ValueError:  # damaged: it is replaced
        return None
    of_date, files = f"The decision of {decision.get('decided_at', '')[:10]}", row["challenger"]["files"]
    made = (decision["champion_after"] or {}).get("version")
    if champion and champion.identity == files and decision["decision"] == "promote" and made == champion.version:
        return f"{of_date} that made it champion"
    is_about_this = decision.get("approval") == row["approval"] == "waiting"
    return f"{of_date} that waits" if is_about_this and decision["challenger"].get("files") == files else None


def headline(row: Mapping[str, Any]) -> str:
    """The result for the challenger in one line; `row` is decision.json."""
    snapshot, before, after = row["challenger"]["snapshot"], row["champion_before"], row["champion_after"]
    if row["decision"] == "promote":
        forced = " (forced)" if row["override"] and row["override"]["kind"] == "force" else ""
        return f"{snapshot} became champion: {row['model']}, version {after['version']}{forced}"
    if not row["checks"]:
        return str(row["reasons"][0]).rstrip(".")
    stays = f"version {before['version']} stays champion" if before else "there is still no champion"
    return f"{snapshot} {'waits for approval' if row['approval'] == 'waiting' else 'is not promoted'}; {stays}"


def print_decision(row: Mapping[str, Any], page: Path, console: SafeConsole, *, kept: str | None = None) -> None:
    """For a terminal. `kept` describes the page where this run made no decision."""
    from rich.table import Table
    from rich.text import Text

    tones = {"promote": "bold green", "hold": "bold yellow", "reject": "bold red"}
    colours = {"passed": "green", "needless": "dim", "failed": "red"}
    console.print(Text.assemble((f"{row['decision']}: ", tones[row["decision"]]), headline(row)), soft_wrap=True)
    lines = Table.grid(padding=(0, 1))
    for mark, sentence in marks_of(row):
        lines.add_row(" ", Text(SIGNS[mark], colours[mark]), sentence)
    for remark in remarks_of(row) if row["checks"] else []:
        lines.add_row(" ", "·", remark)
    if row["override"]:
        lines.add_row(" ", "·", ManualOverride(**row["override"]).sentence)
    if row["test_set"]:
        lines.add_row(" ", "·", looks_text(row["test_set"]))
        lines.add_row(" ", "·", budget_text(row["error_budget"]))
    for warning in row["warnings"]:
        lines.add_row(" ", Text("!", "yellow"), warning)
    if lines.row_count:
        console.print(lines)
    console.print(f"  {kept or 'Every number and reason'}: {as_shell_sees(page)}", soft_wrap=True)
