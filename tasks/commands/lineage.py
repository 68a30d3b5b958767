"""The command `lineage`: where a registered version came from, why it was promoted, and how to make it again.

Reads the version's tags and its folder lineage/, and lists what is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.commands.reproduction import reproduction
from tasks.core.files import read_json
from tasks.core.yaml_text import PLAIN
from tasks.tracking.history import events_of
from tasks.tracking.metrics import flatten
from tasks.tracking.model_uri import find_version
from tasks.tracking.registry import Registry
from tasks.tracking.versions import LINEAGE_FILES, PROVENANCE_FILE, Version

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
DATA_TAG = "data_hash."
DECISION = ("decision", "reasons", "comparison", "override")


def lineage(uri: str, address: str | None = None) -> dict[str, Any]:
    """Everything that a version records about itself; `address` is its registry (None: the one in params.yaml)."""
    return describe(*find_version(uri, address))


def describe(registry: Registry, version: Version) -> dict[str, Any]:
    """The same for a version that was found; `missing` lists what it lacks."""
    files, unreadable = _read_files(registry, version)
    parts = {name: {tag: version.tags.get(tag) for tag in tags} for name, tags in TAGS.items()}
    data = {name.removeprefix(DATA_TAG): value for name, value in version.tags.items() if name.startswith(DATA_TAG)}
    decision, params = files.get("decision.json"), files.get("params.yaml")
    events = events_of(registry, version)
    row: dict[str, Any] = {
        "model": version.model,
        "version": version.version,
        "aliases": registry.aliases(version),
        "snapshot": version.tags.get("snapshot"),
        "reward": version.tags.get("reward"),
        "weights": version.weights or None,
        "data": data,
        "judge": json.loads(version.tags.get("judge", "null")),
        **parts,
        "seeds": _find_seeds(params),
        "params": params,
        "provenance": files.get(PROVENANCE_FILE),
        "history": events,
        "test": (files.get("evaluation.json") or {}).get("test"),
        "decision": decision and {name: decision.get(name) for name in DECISION},
        "earlier": _read_earlier(registry, version, unreadable),
        "altered": unreadable,
    }
    absent = [f"{name}.{tag}" for name in TAGS for tag, value in parts[name].items() if value is None]
    absent += [name for name in ("weights", "snapshot", "data", "history") if not row[name]]
    row["missing"] = absent + [f"lineage/{name}" for name in LINEAGE_FILES if name not in files]
    row["reproduce"] = reproduction(row, version.lineage_folder, registry.settings)
    return row


def _read_earlier(registry: Registry, version: Version, wrong: list[str]) -> list[dict[str, Any]]:
    """The records of earlier registrations of the same weights; adds to `wrong` what cannot be read."""
    try:
        return [
            {
                "folder": earlier.lineage_folder,
                "snapshot": earlier.tags.get("snapshot"),
                "git_commit": earlier.tags.get("git_commit"),
                "test.success_rate": earlier.tags.get("test.success_rate"),
            }
            for earlier in registry.earlier(version)
        ]
    except ValueError as error:
        wrong.append(str(error))
        return []


def _read_files(registry: Registry, version: Version) -> tuple[dict[str, Any], list[str]]:
    """The small files of lineage/, parsed, by name, and what is wrong with others; trajectories are only checked."""
    files: dict[str, Any] = {}
    wrong: list[str] = []
    with TemporaryDirectory() as folder:
        for name in LINEAGE_FILES:
            try:
                file = registry.lineage_file(version, name, Path(folder))
            except ValueError as error:
                wrong.append(str(error))
                continue
            if file is not None:
                files[name] = _parse_file(file)
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
    _paragraph(console, "Why it was promoted", reasons)
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
            table.add_row(Text(f"  {name}", "dim"), Text(_shorten(str(value)), overflow="fold"))
    if row["params"] is not None:
        table.add_row(Text("  params", "dim"), Text("all of them, and every hash in full, with --json"))
    return table


def _shorten(value: str) -> str:
    return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value


def _paragraph(console: SafeConsole, title: str, lines: list[str]) -> None:
    from rich.text import Text

    if lines:
        console.print(Text(f"\n{title}", "bold"))
        for line in lines:
            console.print(Text(f"  {line}"), soft_wrap=True)


def _describe_event(event: Mapping[str, Any], *, besides: str) -> str:
    """One entry of the journal as a line; its reason too, unless the page contains it elsewhere."""
    before = f"instead of {event['instead_of']}" if event.get("instead_of") else "the first"
    moved = f": version {event['champion']}, {before}" if event.get("champion") else ""
    override = f", {event['override']}" if event.get("override") else ""
    defect = ", for a defect" if event.get("defect") else ""
    is_new = event.get("reason") and not besides.startswith(event["reason"])
    reason = f": {event['reason']}" if is_new else ""
    return f"{event['at']} {event['event']}{override}{defect} by {event['by']}{moved}{reason}"
