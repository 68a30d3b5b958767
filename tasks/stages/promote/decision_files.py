"""What a promotion leaves in artifacts/promote: the decision with its page, and what came of this run.

`decision.json` and `decision.html` are of the last decision that was one. A run that finds its challenger champion, or
waiting, already decides nothing: it leaves the decision that made it so where it is. `outcome.json` is always of this
run, small, and what MLflow's runs are found by. Left out: what a decision is (`decision.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_json, write_json, write_text
from tasks.core.settings import Paths
from tasks.stages.promote.decision import headline, print_decision

if TYPE_CHECKING:
    from tasks.tracking.versions import Version

DECISION_FILE, PAGE_FILE, OUTCOME_FILE = "decision.json", "decision.html", "outcome.json"


def record_outcome(paths: Paths, row: Mapping[str, Any], version: Version | None, after: Version | None) -> None:
    """Write what was decided, then what came of this run, and print it. `row` is decision.json so far, `version` the
    challenger's where it is registered, `after` the champion now.
    """
    from tasks.core.console import SafeConsole

    folder, weights = paths.stage("promote"), row["challenger"]["weights"]
    is_champion = after is not None and after.identity == row["challenger"]["files"]
    whole = {**row, "champion_after": describe_version(after), "is_champion": is_champion}
    kept = _decision_that_stands(row, after, folder)
    if kept is None:
        write_decision(paths, whole)
    outcome = {
        "verdict": row["verdict"],
        "policy_verdict": row["policy_verdict"],
        "approval": row["approval"],
        "snapshot": row["challenger"]["snapshot"],
        "weights": weights[:12],
        "registered_model": row["model"],
        "registered_version": version.version if version else None,
        "champion": after.version if after else None,
        "decided_at": row["decided_at"],
    }
    write_json(folder / OUTCOME_FILE, outcome)
    print_decision(whole, folder / PAGE_FILE, SafeConsole(), kept=kept)


def write_decision(paths: Paths, whole: Mapping[str, Any]) -> None:
    """decision.html, then decision.json: where the second is there, the first is of the same decision."""
    from tasks.stages.promote.page import render_decision

    write_text(paths.stage("promote") / PAGE_FILE, render_decision(whole, headline(whole)))
    write_json(paths.stage("promote") / DECISION_FILE, dict(whole))


def describe_version(version: Version | None) -> dict[str, Any] | None:
    if version is None:
        return None
    return {"version": version.version, "weights": version.weights, "files": version.identity, "lineage": version.tags}


def _decision_that_stands(row: Mapping[str, Any], champion: Version | None, folder: Path) -> str | None:
    """What the decision on record here is, where it still says how things are and `row` is no decision of its own: the
    one that made this challenger champion, or by which it waits.
    """
    file = folder / DECISION_FILE
    if row["verdict"] == "promote" or row["checks"] or not file.exists():
        return None
    try:
        decision = read_json(file)
    except ValueError:  # damaged: it is written anew
        return None
    of_today, files = f"The decision of {decision.get('decided_at', '')[:10]}", row["challenger"]["files"]
    made = (decision["champion_after"] or {}).get("version")
    if champion and champion.identity == files and decision["verdict"] == "promote" and made == champion.version:
        return f"{of_today} that made it champion"
    is_about_this = decision.get("approval") == row["approval"] == "waiting"
    return f"{of_today} that waits" if is_about_this and decision["challenger"].get("files") == files else None
