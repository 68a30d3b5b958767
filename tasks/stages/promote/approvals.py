"""`promote --approve` and `promote --withdraw`, which end a decision that waits.

All they need is in the registry, so they work in any folder whose params.yaml names it. An approval requires: the
champion is still the one compared with, the version's files are unaltered, the decision has not expired or ended, and
it is known who approves.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tasks.core.files import read_json
from tasks.core.settings import Settings, load, load_paths, read_params
from tasks.core.text import one_line
from tasks.core.workspace import as_shell_sees
from tasks.stages.promote.decision import approve_row, withdraw_row
from tasks.stages.promote.overrides import ManualOverride
from tasks.stages.promote.publish import promotion_event
from tasks.stages.promote.record import describe_version, headline, write_decision, write_outcome
from tasks.stages.promote.settings import PromoteSettings
from tasks.tracking.aliases import current_champion, lock_registry, make_champion, open_registry, record
from tasks.tracking.history import refuse_held
from tasks.tracking.journal import MAX_REASON, Entry, new_entry, operator
from tasks.tracking.registry import Registry
from tasks.tracking.registry_lock import RegistryLock
from tasks.tracking.settings import TrackingSettings, model_uri
from tasks.tracking.versions import DECISION_FILE, Version
from tasks.tracking.waiting import Waiting, find_waiting, last_waiting_entry, stale_note, tag_answered_runs, withdrawal

Row = Mapping[str, Any]
DECIDE_ANEW = "Run `python -m tasks promote` for a new decision."


class ApprovalSections(Settings):
    promote: PromoteSettings
    tracking: TrackingSettings


def approve(override: ManualOverride, *, decided_at: str | None = None) -> list[str]:
    """Make the waiting version champion; returns the lines to print. ValueError where it cannot be approved, and with
    `decided_at` where another decision waits by now.
    """
    params = read_params()
    settings = load(ApprovalSections, params)
    by = name_of(override.by, "approve")
    registry = open_registry(settings.tracking, settings.promote.model_name)
    version = _version_that_waits(registry, _require_waiting(registry, decided_at))
    _refuse_missing_files(registry, version)
    registry.verify(version)  # slow, and needs no lock
    decision = _decision_of(registry, version)
    with lock_registry(registry) as lock:
        refuse_held(registry)
        waiting, champion = _require_waiting(registry, decided_at), current_champion(registry)
        _refuse_stale(registry, lock, waiting, champion)
        if waiting.version != version.version or waiting.decided_at != decision["decided_at"]:
            raise ValueError(
                f"{registry.model}: another decision now waits, of version {waiting.version}. Nothing was moved. "
                f"Look at it, then approve that one: python -m tasks lineage {model_uri(registry.model, '@challenger')}"
            )
        body = {"version": version.version, "decided_at": waiting.decided_at, "reason": override.reason}
        approval = new_entry("approval", body, by=by)
        word = ManualOverride("approve", override.reason, by)
        row = approve_row(decision, word)
        make_champion(registry, lock, version, promotion_event(row), after=[approval])
    whole = {**row, "champion_after": describe_version(registry.version(version.version) or version)}
    return [f"promote: {headline(whole)}. {word.sentence}", *record_ending(params, approval)]


def withdraw(override: ManualOverride, *, decided_at: str | None = None) -> list[str]:
    params = read_params()
    settings = load(ApprovalSections, params)
    by = name_of(override.by, "withdraw")
    registry = open_registry(settings.tracking, settings.promote.model_name)
    _require_waiting(registry, decided_at)
    with lock_registry(registry) as lock:
        waiting = _require_waiting(registry, decided_at)
        ending = withdrawal(waiting, override.reason, by=by)
        record(registry, lock, [ending])
    told = f"{registry.model} version {waiting.version} no longer waits: {by} withdrew it: {override.reason}"
    return [told, *record_ending(params, ending)]


def record_ending(params: dict[str, Any], ending: Entry) -> list[str]:
    """How a decision ended, into MLflow's runs and the records of this folder that say that it waits; the lines to
    print. `ending` is a person's answer, or of a decision that nobody answered or that is stale.
    """
    settings = load(ApprovalSections, params)
    registry = open_registry(settings.tracking, settings.promote.model_name)
    number, is_approved = ending.body["version"], ending.kind == "approval"
    version = registry.version(number)
    tags = {"decision": "promote", "approval": "given", "champion": str(number)}
    decided_at = ending.body["decided_at"]
    told = _tag_runs(registry, number, decided_at, tags if is_approved else {"approval": "withdrawn"})
    if is_approved and version is None:  # deleted since
        return told
    ended = partial(_end_row, ending=ending, version=version)
    return [*told, *_update_here(params, number, decided_at, ended)]


def _end_row(row: Row, *, ending: Entry, version: Version | None) -> Row:
    """decision.json of the decision that ended so."""
    reason = ending.body["reason"]
    if ending.kind == "approval":
        approved = approve_row(row, ManualOverride("approve", reason, ending.by))
        return {**approved, "champion_after": describe_version(version), "is_champion": True}
    is_by_a_person = "override" in ending.body
    word = (
        ManualOverride("withdraw", reason, ending.by).sentence if is_by_a_person else f"It ended unapproved: {reason}"
    )
    return withdraw_row(row, word)


def _tag_runs(registry: Registry, version: int, decided_at: str, tags: Mapping[str, str]) -> list[str]:
    """A line where MLflow does not take them: the decision has ended either way."""
    try:
        tag_answered_runs(registry, version, decided_at, tags)
    except ValueError as error:
        return [f"warning: MLflow's run of this decision still says that it waits: {one_line(str(error))}"]
    return []


def name_of(given: str | None, verb: str) -> str:
    """The machine's user, always, since --by proves nothing, then the name of --by. ValueError where it is nobody."""
    try:
        user = getpass.getuser().strip()
    except (KeyError, OSError):  # a container without such a user
        user = ""
    name = None if given is None else " ".join(given.split())
    found = None
    if name is None and user in ("", "nobody"):
        found = "this machine has no user name for this process"
    elif name is not None and not (0 < len(name) <= MAX_REASON and name.isprintable()):
        found = "--by names nobody, or cannot be printed"
    if found:
        raise ValueError(
            f"--{verb} by nobody: {found}, and the record must name who put a model into production. Name them: "
            f'python -m tasks promote --{verb} --by NAME --reason "…"'
        )
    machine = operator()
    if name is None or name == machine:
        return machine
    through = f"(through {machine})"
    return name if name.endswith(through) else f"{name} {through}"  # one who answers from a shell is named twice


def _require_waiting(registry: Registry, decided_at: str | None = None) -> Waiting:
    """The decision that waits. ValueError, with what happened to the last one, where none does."""
    waiting = find_waiting(registry)
    if waiting is not None and decided_at in (None, waiting.decided_at):
        return waiting
    if waiting is not None:
        raise ValueError(
            f"{registry.model}: the decision of {decided_at} no longer waits; one about version {waiting.version} "
            f"does. Nothing was moved. Look at it: python -m tasks lineage {model_uri(registry.model, '@challenger')}"
        )
    last, found = last_waiting_entry(registry), "none ever did"
    if last is not None:
        reason = f": {last.body['reason']}" if last.body.get("reason") else ""
        what = {"approval": "was approved", "withdrawal": "was withdrawn"}.get(last.kind, "became champion otherwise")
        found = f"version {last.body.get('version')} {what} at {last.at} by {last.by}{reason}"
    raise ValueError(
        f"{registry.model}: no decision waits for approval; {found}. Run `python -m tasks promote` first; with "
        f"promote.approval: true it waits where the policy would promote."
    )


def _version_that_waits(registry: Registry, waiting: Waiting) -> Version:
    version = registry.version(waiting.version)
    if version is None:
        raise ValueError(
            f"{registry.model}: version {waiting.version}, which waits for approval, was deleted from the registry. "
            f"{DECIDE_ANEW}"
        )
    if any(version.tags.get(name) != value for name, value in waiting.kept.items()):
        raise ValueError(
            f"{version.name}: the tags that verify its files were edited in MLflow, so it may be another "
            f"model than the one decided on. Put them back: python -m tasks registry restore"
        )
    return version


def _refuse_missing_files(registry: Registry, version: Version) -> None:
    problem = registry.missing_files(version)
    if problem:
        raise ValueError(
            f"{version.name}, which waits for approval, could not be served: {problem}. Nothing was moved. Restore "
            f"{registry.settings.artifact_location} from a backup; or upload and promote its snapshot, where that is "
            f'still here: python -m tasks promote --force --reason "…"; or give it up: python -m tasks promote '
            f'--withdraw --reason "…".'
        )


def _decision_of(registry: Registry, version: Version) -> dict[str, Any]:
    """The waiting decision as it was registered. ValueError where it is gone or altered."""
    row: dict[str, Any] | None = registry.read_lineage(version, DECISION_FILE, read_json)
    if row is None:
        raise ValueError(f"{version.name}: has no {DECISION_FILE}, so nobody knows what to approve. {DECIDE_ANEW}")
    return row


def _refuse_stale(registry: Registry, lock: RegistryLock, waiting: Waiting, champion: Version | None) -> None:
    word = stale_note(waiting, champion)
    if word is None:
        return
    record(registry, lock, [withdrawal(waiting, word)])
    raise ValueError(
        f"{registry.model} version {waiting.version} can no longer be approved: {word}. Nothing was moved, and it "
        f"no longer waits. {DECIDE_ANEW}"
    )


def _update_here(params: dict[str, Any], version: int, decided_at: str, answer: Callable[[Row], Row]) -> list[str]:
    """Write how the decision ended into the records of this folder, where they say that it waits."""
    if "paths" not in params:
        return []
    paths = load_paths(params)
    file = paths.stage("promote") / DECISION_FILE
    try:
        before = read_json(file) if file.exists() else {}
    except ValueError:  # damaged: the next promote reports it
        before = {}
    if (before.get("decided_at"), before.get("approval")) != (decided_at, "waiting"):
        return []
    whole = answer(before)
    write_decision(paths, whole)
    write_outcome(paths, whole, version)
    return [f"  Every number and reason: {as_shell_sees(file.with_suffix('.html'))}"]
