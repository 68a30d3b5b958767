"""doctor: is everything that training would read in order? A table of pass, warn, fail and skip, with remedies.

Most faults of reinforcement learning are in the template, the mask, the tools or the data, and cost days when they show
only as an odd curve. The doctor finds them in seconds, without loading weights. The flow runs it before the warm start,
whose hours a fault would waste, and beside nothing, since it measures what memory is free. It repeats no other gate
(`curate`, DVC, the pin) but the budgets. A check that crashes has failed; checks that need what failed are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.doctor.agents import agent_plays
from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.conversation import budgets, chat_template, loss_mask, model_family, requests, tool_replies
from tasks.commands.doctor.effects import settings_take_effect
from tasks.commands.doctor.environment import (
    environment_starts,
    lost_episodes,
    same_seed,
    separate_episodes,
    tools_answer,
)
from tasks.commands.doctor.findings import Finding, NotCheckable, Skipped, of_error, skipped
from tasks.commands.doctor.machine import compiler, disk, duration, memory, threads
from tasks.commands.doctor.scoring import doing_nothing, references_score, test_problems
from tasks.commands.doctor.storage import storage
from tasks.commands.doctor.transfer import notes, other_environments
from tasks.core.files import json_hash, read_json, read_yaml, write_json
from tasks.core.provenance import LOCK_FILE
from tasks.core.settings import Paths, load, load_paths, read_params
from tasks.core.workspace import as_shell_sees
from tasks.pipeline.order import check_params, prepare_process
from tasks.pipeline.run_lock import only_run
from tasks.storage.inputs import copy_inputs

if TYPE_CHECKING:
    from tasks.core.console import SafeConsole

EXAMINED = ("curate", "assess")  # the stages whose results are examined
STYLES = {"pass": "green", "warn": "bold yellow", "fail": "bold red", "skip": "dim"}

Check = Callable[[DoctorContext], Finding]

# Causes first: a check that fails explains those after it.
CHECKS: dict[str, Check] = {
    "environment": environment_starts,
    "model family": model_family,
    "chat template": chat_template,
    "tools answer": tools_answer,
    "lost episodes": lost_episodes,
    "loss mask": loss_mask,
    "requests": requests,
    "tool replies": tool_replies,
    "budgets": budgets,
    "same seed": same_seed,
    "separate episodes": separate_episodes,
    "references score 1": references_score,
    "doing nothing": doing_nothing,
    "agent": agent_plays,
    "test problems": test_problems,
    "other environments": other_environments,
    "notes": notes,
    "settings": settings_take_effect,
    "threads": threads,
    "compiler": compiler,
    "memory": memory,
    "disk": disk,
    "duration": duration,
    "storage": storage,
}
# With a template that fails, checks that play references as text would only fail too.
NEEDS = dict.fromkeys(
    (
        "tools answer",
        "lost episodes",
        "loss mask",
        "tool replies",
        "budgets",
        "same seed",
        "references score 1",
        "doing nothing",
        "agent",
        "other environments",
        "notes",
    ),
    "chat template",
) | {"chat template": "environment", "separate episodes": "same seed"}


@dataclass(frozen=True, slots=True)
class Examined:
    check: str
    result: str
    finding: str
    remedy: str


def run_doctor(*, debug: bool = False) -> bool:
    """Run every check, show the table, write doctor.json; whether none failed. ValueError without curated data."""
    params = read_params()
    check_params(params)
    paths = load_paths(params)
    if not paths.stage("curate").exists():
        raise ValueError(
            f"{paths.stage('curate')}: does not exist, and the doctor examines curated problems. "
            f"Run `dvc repro curate` first."
        )
    prepare_process(params)
    copy_inputs(params)
    with only_run(paths.artifacts):
        from tasks.core.console import SafeConsole

        examined = examine(DoctorContext(load(DoctorSections, params), paths), debug=debug)
        write_json(_file(paths), {"key": examined_key(params), "results": [asdict(item) for item in examined]})
        show(examined, paths, SafeConsole())
    return not any(item.result == "fail" for item in examined)


def examine(
    context: DoctorContext, checks: Mapping[str, Check] | None = None, *, debug: bool = False
) -> list[Examined]:
    """The finding of every check; a fault that several checks meet is reported once. With `debug` a crash is raised."""
    tellers: dict[str, str] = {}  # error: the first check that reported it
    causes: dict[str, str] = {}  # check without an answer of its own: the check that gives the reason
    examined = []
    with closing(context):
        for name, check in (CHECKS if checks is None else checks).items():
            cause = causes.get(NEEDS.get(name, ""))
            try:
                finding = check(context) if cause is None else skipped(cause)
            except Exception as error:
                if debug and not isinstance(error, (ValueError, NotCheckable, Skipped)):
                    raise
                cause = error.cause if isinstance(error, Skipped) else tellers.get(repr(error))
                finding = of_error(error) if cause is None else skipped(cause)
                tellers.setdefault(repr(error), name)
            if finding.result in ("fail", "skip"):
                causes[name] = cause or name
            examined.append(Examined(name, finding.result, finding.text, finding.remedy))
    return examined


def has_passed(params: Mapping[str, Any], paths: Paths) -> bool:
    try:
        stored = read_json(_file(paths))
        results = {item["result"] for item in stored["results"]}
    except (ValueError, KeyError, TypeError):  # it never ran, or somebody edited the file
        return False
    return stored.get("key") == examined_key(params) and "fail" not in results


def examined_key(params: Mapping[str, Any]) -> str:
    """Hash of all settings and of what DVC recorded of the stages examined: their code, data and results."""
    try:
        recorded = read_yaml(LOCK_FILE)["stages"]
    except (ValueError, KeyError):  # missing or damaged
        recorded = {}
    return json_hash({"params": params, "stages": {name: recorded.get(name) for name in EXAMINED}})


def show(examined: list[Examined], paths: Paths, console: SafeConsole) -> None:
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column(Text("Doctor", "bold"), no_wrap=True)
    table.add_column("result", header_style="dim", no_wrap=True)
    table.add_column("finding", header_style="dim", overflow="fold")
    for item in examined:
        table.add_row(item.check, Text(item.result, STYLES[item.result]), item.finding)
    console.print(table)
    console.print()
    for item in examined:
        if item.remedy:
            console.print(Text.assemble((item.result, STYLES[item.result]), " ", (item.check, "bold")))
            console.print(Padding(item.remedy, (0, 0, 1, 5)))
    counts = Counter(item.result for item in examined)
    told = [result for result in STYLES if counts[result] or result != "skip"]
    parts = [Text(f"{counts[result]} {result}", STYLES[result] if counts[result] else "dim") for result in told]
    console.print(Text("doctor: ", "bold") + Text(", ").join(parts))
    console.print(f"{'results':<12}{as_shell_sees(_file(paths))}", soft_wrap=True)


def _file(paths: Paths) -> Path:
    return paths.artifacts / "doctor.json"
