"""The end of a run as a state whose name and message are the verdict: the list of runs tells them apart unopened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.core.files import read_json
from tasks.core.settings import Paths
from tasks.stages.promote.checks.check import p_text
from tasks.stages.promote.record import OUTCOME_FILE
from tasks.tracking.versions import DECISION_FILE

SKIPPED, WAITING = "Skipped", "Waiting"
NAMES = {"promote": "Promoted", "hold": "Held", "reject": "Rejected"}


def read_verdict(paths: Paths) -> State[None]:
    """Of the run that has just ended, from promote's files."""
    folder = paths.stage("promote")
    return name_verdict(read_json(folder / OUTCOME_FILE), read_json(folder / DECISION_FILE))


def name_verdict(outcome: Mapping[str, Any], decision: Mapping[str, Any]) -> State[None]:
    """`outcome` is of this run, `decision` the last one that was made."""
    if outcome["approval"] == "waiting":
        return end(WAITING, f"for a person's approval of {outcome['snapshot']}{_describe_gain(decision)}")
    if outcome["decided_at"] != decision["decided_at"]:  # nothing new was decided
        return end("Unchanged", f"version {outcome['champion']} is champion already")
    version = f"version {outcome['registered_version']}" if outcome["decision"] == "promote" else ""
    told = f"{version}{_describe_gain(decision)}".removeprefix(", ")
    return end(NAMES[outcome["decision"]], told or str(decision["reasons"][0]))


def end(name: str, told: str) -> State[None]:
    """`Held` and `held: …`. Skipped is Completed too: a worker logs a traceback for a run that ends as Cancelled."""
    return Completed(name=name, message=f"{name.lower()}: {told}")


def _describe_gain(decision: Mapping[str, Any]) -> str:
    """`, +0.4 points, p = 0.400`: of success against the champion, or what stands in its place before the first."""
    difference = decision["comparison"]
    if difference is None:
        return ""
    return f", {100 * difference['difference']:+.1f} points, {p_text(difference['p_value'])}"
