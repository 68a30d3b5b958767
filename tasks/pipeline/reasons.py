"""Why a run is needed, or since which run nothing changed.

DVC says what changed here (`dvc status`, the params and hashes in `dvc.lock`); it is compared with the last finished
run, which MLflow knows, so a run that died half way has its reason still and another machine repeats nothing. Beside
it: the environment's drift, a champion that fell, a decision that nobody approved, and a person's wish. `begin_run`
writes the reasons down and makes training anew give something new: the same seed and data give the same weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tasks.core.forked import VARIABLE as SERVER_OF_FORKS
from tasks.core.params_text import read_as_dvc, set_number
from tasks.core.provenance import CODE
from tasks.core.resume import GRAPH
from tasks.core.settings import PARAMS_FILE, Paths, load
from tasks.core.text import first_few, one_line
from tasks.core.workspace import dvc_variables
from tasks.drift.fall import note_fall
from tasks.drift.pin import find_drift
from tasks.environments.settings import EnvironmentSettings
from tasks.pipeline.cli_errors import TELEMETRY_OFF
from tasks.stages.promote.origin import differing_settings
from tasks.tracking.aliases import current_champion, open_registry
from tasks.tracking.finish_seen import recall_finish
from tasks.tracking.finished_runs import (
    FinishedRun,
    Inputs,
    inputs_now,
    last_finished,
    read_reasons,
    reason_text,
    write_reasons,
)
from tasks.tracking.journal import MAX_REASON
from tasks.tracking.measurements import read_checks
from tasks.tracking.registry import Registry
from tasks.tracking.settings import TrackingSections
from tasks.tracking.waiting import ended_unapproved, last_waiting_entry

Kind = Literal["data", "recipe", "code", "drift", "champion_fell", "decision", "person", "first"]
TRAINS_ANEW = ("champion_fell",)
LASTS = ("person", "drift")  # what the end of a killed run does not show by itself
CURATE, TRAIN = "curate", "train"
UNFINISHED = "a run that did not finish had: "
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Reason:
    kind: Kind
    text: str

    def to_row(self) -> dict[str, str]:
        return {"kind": self.kind, "text": self.text}


@dataclass(frozen=True, slots=True)
class RunReasons:
    """The reasons of a run, none where it is not needed. `last` is the model's last finished run, `fall` the row of the
    drift check that found the champion fallen.
    """

    reasons: list[Reason]
    last: FinishedRun | None
    force: bool
    fall: Mapping[str, Any] | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self.reasons)

    @property
    def kinds(self) -> list[str]:
        """For tags, without repeats."""
        return list(dict.fromkeys(reason.kind for reason in self.reasons))

    @property
    def sentence(self) -> str:
        """One line: the reasons, or since when nothing changed."""
        if self.reasons:
            return reason_text([reason.to_row() for reason in self.reasons])
        assert self.last is not None
        return f"nothing changed since {self.last.name} ({self.last.outcome})"

    def is_forced(self, stage: str) -> bool:
        """Whether `dvc repro` is to run it with --force: DVC sees nothing of an environment's drift. A run that stopped
        later has curated for it already, if DVC finds nothing to do there.
        """
        drift = [reason.text for reason in self.reasons if reason.kind == "drift"]
        if stage != CURATE or not drift:
            return False
        return any(not text.startswith(UNFINISHED) for text in drift) or CURATE in read_status()


def find_reasons(params: dict[str, Any], paths: Paths, *, asked: str | None = None, force: bool = False) -> RunReasons:
    """Every reason to run; `asked` is a person's, and `force` trains anew. The caller has the folder's lock and has
    released what a killed DVC locked. ValueError in one line where DVC, MLflow or the environment cannot be asked, or
    the champion is not the one of the record: promotion would refuse it after hours of training.
    """
    check_asked(asked, force=force)
    tracking, model = load(TrackingSections, params).tracking, params["promote"]["model_name"]
    last = last_finished(tracking, model, paths)
    reasons = [Reason("person", f"a person asked: {one_line(asked)}")] if asked else []
    if last is None:
        reasons.append(Reason("first", f"the first run of {model}: {tracking.uri} has no finished one"))
    else:
        reasons += _changes_since(last, params, paths)
        registry = Registry(tracking, model) if last.waits else None
        unapproved = ended_unapproved(registry) if registry else None
        if unapproved:
            reasons.append(Reason("decision", unapproved))
        elif registry and (ending := last_waiting_entry(registry)) and ending.kind == "approval":
            last = replace(last, outcome=f"version {ending.body['version']} approved since by {ending.by}")
    reasons += _drift(params, paths)
    checks = read_checks(tracking, model)
    champion = current_champion(open_registry(tracking, model), quietly=True) if last or checks else None
    fall = find_fall(checks, champion.version if champion else None, last)
    if fall is not None:
        reasons.append(Reason("champion_fell", _describe_fall(fall)))
    return RunReasons(_with_unfinished(reasons, paths), last, force, fall)


def check_asked(reason: str | None, *, force: bool) -> None:
    if force and not reason:
        raise ValueError(
            "--force repeats every stage, and without a reason nobody could say later why. Add --reason TEXT."
        )
    if reason and len(one_line(reason, MAX_REASON + 1)) > MAX_REASON:
        raise ValueError(
            f"--reason has more than {MAX_REASON:,} characters, and MLflow must show it. Shorten it and run again."
        )


def find_unchanged(params: dict[str, Any], paths: Paths) -> RunReasons | None:
    """`find_reasons` without MLflow, where its database is as the last finished run left it and there is no reason;
    None where MLflow is to be asked. The caller as there.
    """
    last = recall_finish(load(TrackingSections, params).tracking, params["promote"]["model_name"], paths)
    if last is None:
        return None
    reasons = [*_changes_since(last, params, paths), *_drift(params, paths)]
    found = RunReasons(_with_unfinished(reasons, paths), last, force=False)
    return None if found.is_needed else found


def _changes_since(last: FinishedRun, params: Mapping[str, Any], paths: Paths) -> list[Reason]:
    now = {**inputs_now(params["promote"]), "params": read_as_dvc(PARAMS_FILE.read_bytes())}
    return find_changes(last.inputs, now, read_status(), paths)


def _drift(params: Mapping[str, Any], paths: Paths) -> list[Reason]:
    drift = find_drift(EnvironmentSettings.model_validate(params["environment"]), paths)
    return [Reason("drift", f"the environment changed since curation: {listed(drift)}")] if drift else []


def find_fall(
    checks: Sequence[Mapping[str, Any]], champion: int | None, last: FinishedRun | None
) -> Mapping[str, Any] | None:
    """The row of the newest drift check, where it found today's champion fallen and the last finished run was not the
    answer: after that, training anew again every night would change nothing in the world.
    """
    if not checks or not checks[-1]["fell"] or checks[-1]["champion"] != champion:
        return None
    is_answered = last is not None and "champion_fell" in last.reason_kinds and last.champion == champion
    return None if is_answered else checks[-1]


def _describe_fall(check: Mapping[str, Any]) -> str:
    before, fall = check["promoted"]["success_rate"], -100 * check["most_change"]  # in points
    return (
        f"version {check['champion']} fell from {before:.1%} to {check['success_rate']:.1%}, by {fall:.1f} points or "
        f"more, as the drift check of {check['at'][:10]} found"
    )


def begin_run(found: RunReasons, params: Mapping[str, Any], paths: Paths) -> str | None:
    """Write the reasons before the first stage. Training anew takes the next seed, written into params.yaml once. A
    run that died goes on with it. Returns the line that says so. Where no run has finished, dvc.lock's training counts.
    """
    line, wants_next_seed = None, found.force or any(kind in TRAINS_ANEW for kind in found.kinds)
    before = inputs_now(params["promote"]) if found.last is None else found.last.inputs
    if wants_next_seed and params["seed"] == _seed_of(before):
        line = _raise_seed(params["seed"])
    elif wants_next_seed and _seed_of(before) is not None:
        line = (
            f"seed stays {params['seed']}, with which no run has finished: what one that died may have trained with it "
            f"is used. For another model raise seed in {PARAMS_FILE}"
        )
    if found.fall is not None:
        note_fall(paths, found.fall)
    write_reasons(paths, [reason.to_row() for reason in found.reasons])
    return line


def _seed_of(before: Inputs) -> Any:
    return before["stages"][TRAIN]["params"].get("seed") if TRAIN in before["stages"] else None


def _raise_seed(seed: int) -> str:
    if not set_number(PARAMS_FILE, ("seed",), seed + 1):
        raise ValueError(
            f"{PARAMS_FILE}: seed could not be raised without changing more than that, and with seed {seed} training "
            f"would make the same model again. Write it as a plain number, or raise it by hand."
        )
    return f"seed is {seed + 1} in {PARAMS_FILE} from now on: with {seed} training would make the same model again"


def find_changes(before: Inputs, now: Mapping[str, Any], status: Mapping[str, Any], paths: Paths) -> list[Reason]:
    """What differs from a finished run: in dvc.lock, which a killed or manual run moved on, and in the files since.
    `now` has today's `params` too, as DVC reads them; `status` is DVC's.

    A result that is not in this folder is no change: another machine may have made it, and `dvc pull` brings it.
    """
    files = {*_changed_deps(before, now), *_changed_files(status, paths)}
    code = sorted(file for file in files if file.startswith(CODE) or file == str(GRAPH))
    found: list[tuple[Kind, str, Sequence[str]]] = [
        ("recipe", "the recipe changed", _changed_recipe(before, now)),
        ("code", "code changed", code),
        ("data", "data changed", sorted(files.difference(code))),
        ("data", "results were edited", sorted(_edited_results(status))),
    ]
    policy = _differing({"promote": before["promote"]}, {"promote": now["promote"]})
    of_policy = [Reason("recipe", f"the policy of promotion changed: {one_line(', '.join(policy))}")] if policy else []
    return [*of_policy, *(Reason(kind, f"{what}: {listed(names)}") for kind, what, names in found if names)]


def _changed_recipe(before: Inputs, now: Mapping[str, Any]) -> list[str]:
    """Each setting that a stage ran with and that differs now. Those of promotion are a reason of their own, never cut
    short: they decide what becomes champion.
    """
    of_stages: dict[str, Any] = {}
    for entry in before["stages"].values():
        of_stages |= entry["params"]
    return _differing(of_stages, now["params"])


def _differing(ran: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`train.group_size 8 → 5`."""
    return [f"{name} {before} → {has}" for name, before, has in differing_settings(ran, now)]


def _changed_deps(before: Inputs, now: Mapping[str, Any]) -> Iterator[str]:
    """Files and folders, other stages' results aside, whose hash in dvc.lock differs; the graph for another command."""
    for stage, entry in now["stages"].items():
        ran = before["stages"].get(stage, {"cmd": None, "deps": {}})
        yield from (path for path, md5 in entry["deps"].items() if ran["deps"].get(path) != md5)
        if entry["cmd"] != ran["cmd"]:
            yield str(GRAPH)


def _changed_files(status: Mapping[str, Any], paths: Paths) -> Iterator[str]:
    for changes in status.values():
        if "changed command" in changes:
            yield str(GRAPH)
        for path, change in _items(changes, "changed deps"):
            if isinstance(change, str) and not Path(path).is_relative_to(paths.artifacts):  # params are a mapping
                yield path


def _edited_results(status: Mapping[str, Any]) -> Iterator[str]:
    for changes in status.values():
        yield from (path for path, change in _items(changes, "changed outs") if change == "modified")


def _items(changes: Sequence[Any], what: str) -> Iterator[tuple[str, Any]]:
    for change in changes:
        if isinstance(change, dict):
            yield from change.get(what, {}).items()


def read_status() -> dict[str, Any]:
    """`dvc status --json`: what changed, by stage. ValueError where DVC cannot say."""
    env = {**TELEMETRY_OFF, **os.environ, **dvc_variables()}
    by_fork = ["tasks.core.forked"] if SERVER_OF_FORKS in os.environ else []
    command = [sys.executable, "-m", *by_fork, "dvc", "status", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        said = one_line(done.stderr.rpartition("ERROR: ")[2] or f"status {done.returncode}")
        raise ValueError(
            f"DVC could not say what changed ({said}), so it is unknown whether a run is needed. Run `dvc status`, "
            f"correct what it shows, and run again."
        ) from None


def _with_unfinished(reasons: list[Reason], paths: Paths) -> list[Reason]:
    """With those of a run that did not finish, where nothing else shows them."""
    kinds = {reason.kind for reason in reasons}
    left = [row for row in read_reasons(paths) if row["kind"] in LASTS and row["kind"] not in kinds]
    return [*reasons, *(Reason(row["kind"], _unfinished(row["text"])) for row in left)]  # type: ignore[arg-type]


def _unfinished(text: str) -> str:
    return f"{UNFINISHED}{text.removeprefix(UNFINISHED)}"


def listed(names: Sequence[str]) -> str:
    return one_line(first_few(names, MAX_NAMED))
