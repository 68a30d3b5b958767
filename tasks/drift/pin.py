"""Pins the environment at curation and compares it with the current one before a stage plays in it.

This detects changes outside the repository: a server's tools, an upgraded package. Curation writes `environment.json`:
the environment's description, and probes (known solutions with their replies). Later stages compare both first; a
difference stops them with a list. `--accept-drift` continues anyway, recorded in `artifacts/accepted_drift.json` and
the model's lineage. Edits of our own code need none of this: DVC curates again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.core.files import json_hash, read_json, write_text
from tasks.core.json_diff import changes
from tasks.core.records import Problem
from tasks.core.settings import Paths
from tasks.core.terminal import warn
from tasks.drift.probes import pin_probes, probe_changes
from tasks.environments.catalog import load_bare_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.tools.base import Environment, EnvironmentFault
from tasks.tools.replay import Played, Script, play

PIN_FILE, ACCEPTED_FILE = "environment.json", "accepted_drift.json"
ACCEPT_VARIABLE = "TURNWISE_ACCEPT_DRIFT"  # passes --accept-drift to stages that DVC or the flow starts
ROUNDS = (1, 2, 8)  # plays, until no difference is left: replies that differ between them are random, not drift
MAX_LINES = 12

Pin = dict[str, Any]  # "fingerprint", "description" and "probes"
Record = dict[str, Any]  # an accepted drift: "pinned", "today", "changes", "stages", "date", "environment"


@dataclass(frozen=True, slots=True)
class DriftCheck:
    """The environment of a stage: its fingerprint, the hash of its pin, and the accepted drift."""

    fingerprint: str
    pin: str
    drift: list[str]

    def to_row(self) -> dict[str, Any]:
        return asdict(self)


def accept_drift_from_now_on() -> None:
    """For `--accept-drift`: this process and its children record a difference instead of stopping."""
    os.environ[ACCEPT_VARIABLE] = "1"


def play_probes(settings: EnvironmentSettings, problems: Sequence[Problem]) -> list[Played]:
    """The problems' references, without injected faults or tool cache; empty if the cache is `strict`."""
    if is_strict(settings):
        return []
    with _open_bare(settings) as environment:
        return _play(environment, problems)


def make_pin(environment: Environment, problems: Sequence[Problem], plays: Sequence[Sequence[Played]]) -> Pin:
    """The description, and what several plays of the probes have in common."""
    description = json.loads(json.dumps(environment.describe()))
    probes = pin_probes(problems, plays) if all(plays) else []
    return {"fingerprint": environment.fingerprint(), "description": description, "probes": probes}


def write_pin(folder: Path, pin: Pin) -> None:
    _write(folder / PIN_FILE, pin)


def check_pin(settings: EnvironmentSettings, paths: Paths, *, stage: str) -> DriftCheck:
    """Compare the environment with the pinned one. ValueError lists the changes, unless they were accepted."""
    pin: Pin = read_json(paths.stage("curate") / PIN_FILE)
    known = _known(paths, pin)
    found, today = _recognise(settings, known)
    if found is None and os.environ.get(ACCEPT_VARIABLE) != "1":
        lines = drift_between(known[min(1, len(known) - 1)], today)
        raise ValueError(_report(lines, stage, paths, is_further=len(known) > 1))
    found = found or today
    checked = DriftCheck(found["fingerprint"], _hash(found), drift_between(pin, found))
    _keep(paths, stage, pin, found, checked.drift)
    if checked.drift:
        count = f"{len(checked.drift)} change{'s' if len(checked.drift) > 1 else ''}"
        line = f"{stage}: continues under an accepted drift of the environment ({count}, listed in {_file(paths)})"
        warn(line)
    return checked


def find_drift(settings: EnvironmentSettings, paths: Paths) -> list[str]:
    """What changed in the environment since curation, a line each; none where a person accepted it, accepts what is
    found from now on, or nothing was curated here.
    """
    file = paths.stage("curate") / PIN_FILE
    if not file.exists() or os.environ.get(ACCEPT_VARIABLE) == "1":
        return []
    known = _known(paths, read_json(file))
    found, today = _recognise(settings, known)
    return [] if found is not None else drift_between(known[min(1, len(known) - 1)], today)


def description_changes(environment: Environment, paths: Paths) -> list[str]:
    """The same of an environment that is open, by its description alone: no probe is played."""
    file = paths.stage("curate") / PIN_FILE
    if not file.exists() or os.environ.get(ACCEPT_VARIABLE) == "1":
        return []
    today = json.loads(json.dumps(environment.describe()))
    found = [list(changes(pin["description"], today)) for pin in _known(paths, read_json(file))]
    return found[0] if all(found) else []


def _known(paths: Paths, pin: Pin) -> list[Pin]:
    """The pin, then each accepted environment, the newest first."""
    accepted = [record["environment"] for record in read_accepted(paths) if record["pinned"] == _hash(pin)]
    return [pin, *reversed(accepted)]


def drift_between(old: Pin, new: Pin) -> list[str]:
    return [*changes(old["description"], new["description"]), *probe_changes(old["probes"], new["probes"])]


def read_accepted(paths: Paths) -> list[Record]:
    return list(read_json(_file(paths))) if _file(paths).exists() else []


def accepted_changes(paths: Paths) -> list[str]:
    """For the lineage: each accepted drift of the current pin, with its stages."""
    pinned = _hash(read_json(paths.stage("curate") / PIN_FILE))
    return [
        f"{', '.join(record['stages'])}: {'; '.join(record['changes'])}"
        for record in read_accepted(paths)
        if record["pinned"] == pinned and record["stages"]
    ]


def is_strict(settings: EnvironmentSettings) -> bool:
    return settings.cache.mode == "strict"


def _recognise(settings: EnvironmentSettings, known: Sequence[Pin]) -> tuple[Pin | None, Pin]:
    """(the first known environment without a difference from the current one, or None; the current one)."""
    problems = [Problem.model_validate(probe["problem"]) for probe in known[0]["probes"]]
    plays: list[list[Played]] = []
    with _open_bare(settings) as environment:
        for num_plays in ROUNDS[:1] if is_strict(settings) else ROUNDS:
            if is_strict(settings):
                today = {**make_pin(environment, [], []), "probes": known[0]["probes"]}
            else:
                plays += [_play(environment, problems) for _ in range(num_plays)]
                today = make_pin(environment, problems, plays)
            found = next((pin for pin in known if not drift_between(pin, today)), None)
            if found is not None:
                break
    return found, today


@contextmanager
def _open_bare(settings: EnvironmentSettings) -> Iterator[Environment]:
    """The bare environment, or its recording if the tools are off; a fault becomes a ValueError."""
    try:
        with closing(load_bare_environment(settings, with_cache=is_strict(settings))) as environment:
            yield environment
    except EnvironmentFault as fault:
        raise ValueError(
            f"the environment could not be compared with the one at curation ({fault}), so a change would not "
            f"be noticed. Nothing was run. Repair what failed and run again."
        ) from None


def _play(environment: Environment, problems: Sequence[Problem]) -> list[Played]:
    """EnvironmentFault if a probe could not be played: its replies then show nothing."""
    played = play(environment, [Script.reference(problem) for problem in problems])
    for item in played:
        if isinstance(item.error, EnvironmentFault):
            raise item.error
    return played


def _report(lines: Sequence[str], stage: str, paths: Paths, *, is_further: bool) -> str:
    more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    since = "the drift that was accepted" if is_further else "curation"
    return "\n".join(
        [
            f"{stage}: the environment has changed since {since}, so data, models and results from before do not apply "
            f"to it. Nothing was run.",
            *(f"  {line}" for line in [*lines[:MAX_LINES], *more]),
            "Curate for the changed environment with `dvc repro --force curate`, and run again. Or continue with "
            f"--accept-drift (under DVC: {ACCEPT_VARIABLE}=1), which is recorded in {_file(paths)} and the lineage. If "
            "replies are live data, set curate.num_probe_problems: 0 to compare only the descriptions.",
        ]
    )


def _keep(paths: Paths, stage: str, pin: Pin, found: Pin, drift: Sequence[str]) -> None:
    """Record under which accepted drift the stage continues; remove it from the others of this pin."""
    records, pinned, today = read_accepted(paths), _hash(pin), _hash(found)
    before = json_hash(records)
    for record in records:
        if record["pinned"] == pinned and stage in record["stages"]:
            record["stages"].remove(stage)
    if drift:
        key = {"pinned": pinned, "today": today}
        record = next((item for item in records if key.items() <= item.items()), {})
        if not record:
            date = datetime.now(UTC).date().isoformat()
            record |= {**key, "changes": list(drift), "stages": [], "date": date, "environment": found}
            records.append(record)
        record["stages"].append(stage)
    if json_hash(records) != before:
        _write(_file(paths), records)


def _write(file: Path, value: Any) -> None:
    """Unsorted: the model reads tools and arguments in this order."""
    write_text(file, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _hash(pin: Pin) -> str:
    return json_hash(json.dumps(pin))


def _file(paths: Paths) -> Path:
    return paths.artifacts / ACCEPTED_FILE
