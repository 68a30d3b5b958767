"""The command `lineage`: where a registered version came from, why it was promoted, and how to make it again.

Reads the version's tags and its folder lineage/, and lists what is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.reproduction import reproduction
from tasks.core.files import read_json
from tasks.core.text import printable
from tasks.core.yaml_text import PLAIN
from tasks.stages.promote.publish import with_approval
from tasks.tracking.aliases import describe_edited, edited_tags
from tasks.tracking.history import DECIDED_AT, events_of, read_history
from tasks.tracking.metrics import flatten
from tasks.tracking.model_uri import find_version
from tasks.tracking.registry import Registry
from tasks.tracking.versions import DECISION_FILE, LINEAGE_FILES, PROVENANCE_FILE, Version

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tasks.core.console import SafeConsole

TAGS = {  # each part of the lineage: its name among a version's tags
    "why": ("reason",),
    "environment": (
        "environment", "environment_fingerprint", "environment_fingerprint_at_evaluation", "environment_drift",
    ),
    "code": (
        "git_commit", "git_dirty", "evaluation.git_commit", "evaluation.git_dirty", "dvc_lock_hash", "params_hash",
    ),
    "machine": ("python", "platform", "cpu", "num_threads", "device", "trainers", "packages_hash"),
    "results": (
        "test.success_rate", "test.ci_low", "test.ci_high", "test.num_problems", "test.samples_per_problem",
        "select.success_rate",
    ),
}  # fmt: skip
COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}|none")
DATA_TAG = "data_hash."
DECISION = ("decision", "reasons", "comparison", "override", "decided_at")


def lineage(uri: str, address: str | None = None) -> dict[str, Any]:
    """Everything that a version records about itself; `address` is its registry (None: the one in params.yaml)."""
    return describe(*find_version(uri, address))


def describe(registry: Registry, version: Version) -> dict[str, Any]:
    """The same for a version that was found; `missing` lists what it lacks."""
    files, unreadable = _read_files(registry, version)
    if edited := edited_tags(read_history(registry), version):
        unreadable.append(describe_edited(version, edited))
    parts = {name: {tag: version.tags.get(tag) for tag in tags} for name, tags in TAGS.items()}
    parts["code"]["git_commit"] = _read_commit(version, unreadable)
    registrations = [version, *_read_earlier(registry, version, unreadable)]
    data = {name.removeprefix(DATA_TAG): value for name, value in version.tags.items() if name.startswith(DATA_TAG)}
    params, events = files.get("params.yaml"), events_of(registry, version)
    row: dict[str, Any] = {
        "model": version.model,
        "version": version.version,
        "aliases": registry.aliases(version),
        "snapshot": version.tags.get("snapshot"),
        "reward": version.tags.get("reward"),
        "weights": version.weights or None,
        "data": data,
        "judge": _read_judge(version, unreadable),
        **parts,
        "seeds": _find_seeds(params),
        "params": params,
        "provenance": files.get(PROVENANCE_FILE),
        "history": events,
        "test": (files.get("evaluation.json") or {}).get("test"),
        "decision": _find_decision(registry, registrations, events, unreadable),
        "earlier": [_summarise(earlier) for earlier in registrations[1:]],
        "altered": list(dict.fromkeys(unreadable)),
    }
    absent = [f"{name}.{tag}" for name in TAGS for tag, value in parts[name].items() if value is None]
    absent += [name for name in ("weights", "snapshot", "data", "history") if not row[name]]
    row["missing"] = absent + [f"lineage/{name}" for name in LINEAGE_FILES if name not in files]
    row["reproduce"] = reproduction(row, version.lineage_folder, registry.settings)
    return row


def _find_decision(
    registry: Registry, registrations: Sequence[Version], events: Sequence[Mapping[str, Any]], wrong: list[str]
) -> dict[str, Any] | None:
    """The decision that made the version champion: of its registrations the one that its last promotion names, and
    before promotions named one, the latest that took effect. The latest one of a version that never was champion.
    """
    decisions = [decision for item in registrations if (decision := _read_decision(registry, item, wrong))]
    number = registrations[0].version
    promotions = [event for event in events if event["event"] == "promotion" and event["champion"] == number]
    made = promotions[-1].get(DECIDED_AT) if promotions else None
    named = [decision for decision in decisions if decision.get("decided_at") == made]
    effective = [decision for decision in decisions if decision.get("decision") == "promote"]
    ranked = named if made else [*(effective if promotions else []), *decisions]
    return {name: ranked[0].get(name) for name in DECISION} if ranked else None


def _read_decision(registry: Registry, version: Version, wrong: list[str]) -> dict[str, Any] | None:
    try:
        decision = registry.read_lineage(version, DECISION_FILE, read_json)
    except ValueError as error:
        wrong.append(str(error))
        return None
    return with_approval(registry, version, decision) if decision else None


def _read_earlier(registry: Registry, version: Version, wrong: list[str]) -> list[Version]:
    """The earlier registrations of the same weights, the latest first; adds to `wrong` what cannot be read."""
    try:
        return registry.earlier(version)
    except ValueError as error:
        wrong.append(str(error))
        return []


def _summarise(earlier: Version) -> dict[str, Any]:
    tags = {name: earlier.tags.get(name) for name in ("snapshot", "git_commit", "test.success_rate")}
    return {"folder": earlier.lineage_folder, **tags}


def _read_commit(version: Version, wrong: list[str]) -> str | None:
    """The commit of its training, which git is asked about: anything else could be an option, such as `--output=FILE`.
    Adds to `wrong` where that tag was edited.
    """
    commit = version.tags.get("git_commit")
    if commit is None or COMMIT.fullmatch(commit):
        return commit
    wrong.append(
        f"{version.name}: its tag git_commit was edited in MLflow and is no commit, so its code is unknown. "
        f"lineage/{PROVENANCE_FILE} has the commit of each stage."
    )
    return None


def _read_judge(version: Version, wrong: list[str]) -> dict[str, Any] | None:
    """The judge as registered; adds to `wrong` where that tag was edited."""
    try:
        found = json.loads(version.tags.get("judge", "null"))
        return None if found is None else dict(found)
    except (TypeError, ValueError):
        wrong.append(
            f"{version.name}: its tag judge was edited in MLflow, so the judge is unknown. The page of its logged "
            f"model ({version.model_id}) has a copy of that tag."
        )
        return None


def _read_files(registry: Registry, version: Version) -> tuple[dict[str, Any], list[str]]:
    """The small files of lineage/, parsed, by name, and what is wrong with others; trajectories are only checked."""
    files: dict[str, Any] = {}
    wrong: list[str] = []
    for name in LINEAGE_FILES:
        try:
            content = registry.read_lineage(version, name, _parse_file)
        except ValueError as error:
            wrong.append(str(error))
            continue
        if content is not None:
            files[name] = content
    return files, wrong


def _parse_file(file: Path) -> Any:
    if file.suffix == ".json":
        return read_json(file)
    return PLAIN.load(file.read_text(encoding="utf-8")) if file.name == "params.yaml" else True


def _find_seeds(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in flatten(params or {}) if name.rsplit(".", 1)[-1].endswith("seed")}


def as_json(row: Mapping[str, Any]) -> str:
    return json.dumps(row, indent=2, ensure_ascii=False)


def print_lineage(row: Mapping[str, Any], console: SafeConsole) -> None:
    from rich.text import Text

    aliases = f" ({', '.join(row['aliases'])})" if row["aliases"] else ""
    console.print(Text(f"{row['model']} version {row['version']}{aliases}", "bold"))
    console.print(_facts(row))
    reasons = (row["decision"] or {}).get("reasons") or []
    is_promoted = (row["decision"] or {}).get("decision") == "promote"
    _paragraph(console, "Why it was promoted" if is_promoted else "What was decided", reasons)
    _paragraph(console, "History", [_describe_event(event, besides=" ".join(reasons)) for event in row["history"]])
    told = [", ".join(f"{name.replace('_', ' ')} {value}" for name, value in item.items()) for item in row["earlier"]]
    _paragraph(console, "The same weights were registered before", told)
    _paragraph(console, "Make it again", [*row["reproduce"]["commands"], "", *row["reproduce"]["notes"]])
    _paragraph(console, "Altered", row["altered"])
    _paragraph(console, "Missing", [", ".join(row["missing"])] if row["missing"] else [])


def _facts(row: Mapping[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    facts = {"snapshot": row["snapshot"], "reward": row["reward"], "weights": row["weights"]}
    facts |= {f"data {name}": value for name, value in sorted(row["data"].items())}
    for part in TAGS:
        facts |= {name.replace("_", " "): value for name, value in row[part].items()}
    facts |= {f"judge {name}": value for name, value in flatten(row["judge"] or {})}
    facts |= dict(row["seeds"])
    for name, value in facts.items():
        if value is not None:
            table.add_row(Text(printable(f"  {name}"), "dim"), Text(_shorten(str(value)), overflow="fold"))
    if row["params"] is not None:
        table.add_row(Text("  params", "dim"), Text("all of them, and every hash in full, with --json"))
    return table


def _shorten(value: str) -> str:
    return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else printable(value)


def _paragraph(console: SafeConsole, title: str, lines: list[str]) -> None:
    from rich.text import Text

    """A line end within a line is shown: in MLflow anybody can write a tag, and so forge a command to paste."""
    if lines:
        console.print(Text(f"\n{title}", "bold"))
        for line in lines:
            console.print(Text(printable(f"  {line}")), soft_wrap=True)


def _describe_event(event: Mapping[str, Any], *, besides: str) -> str:
    """One entry of the journal as a line; its reason too, unless the page contains it elsewhere."""
    before = f"instead of {event['instead_of']}" if event.get("instead_of") else "the first"
    moved = f": version {event['champion']}, {before}" if event.get("champion") else ""
    override = f", {event['override']}" if event.get("override") else ""
    defect = ", for a defect" if event.get("defect") else ""
    is_new = event.get("reason") and not besides.startswith(event["reason"])
    reason = f": {event['reason']}" if is_new else ""
    return f"{event['at']} {event['event']}{override}{defect} by {event['by']}{moved}{reason}"
