"""Publish a decision: register the challenger with its lineage, and make it champion over the one it was compared with.

The slow upload comes first; registration and aliases follow under the registry's lock, which refuses another champion
than the expected one. So of two concurrent promotions one wins and the other is refused. Where a run was killed before
it wrote decision.json, the next run restores it from the version.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_json, write_json
from tasks.core.provenance import LOCK_FILE
from tasks.core.settings import PARAMS_FILE, Paths
from tasks.drift.pin import accepted_changes
from tasks.models.trained_on import read_trained_on, write_trained_on
from tasks.stages.promote.decision import approve_row
from tasks.stages.promote.episodes import Conditions, registered_decision
from tasks.stages.promote.overrides import ManualOverride
from tasks.tracking.versions import DECISION_FILE

if TYPE_CHECKING:
    from tasks.core.provenance import Origin
    from tasks.stages.promote.challenger import Challenger
    from tasks.tools.base import Environment
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version


def publish(
    paths: Paths,
    challenger: Challenger,
    registry: Registry,
    environment: Environment,
    origin: Origin,
    *,
    decision: Mapping[str, Any],
    instead_of: Version | None,
) -> Version:
    """Register the challenger and make it champion, or give it the alias `challenger` where the decision waits; returns
    the version. `decision` is decision.json so far, `instead_of` the champion it was made against: ValueError, and
    nothing moved, where that is another by now.
    """
    from tasks.tracking.aliases import lock_registry, make_champion, refuse_another_champion
    from tasks.tracking.finished_runs import BY_HAND, read_reasons, reason_text
    from tasks.tracking.history import refuse_held
    from tasks.tracking.lineage import lineage_tags
    from tasks.tracking.metrics import RUN_ID_VARIABLE
    from tasks.tracking.waiting import record_waiting, withdraw_decided_again, withdraw_stale

    run_id = os.environ.get(RUN_ID_VARIABLE) or None  # a flow's; by hand there is none
    upload: dict[str, Any] = {"folder_hash": challenger.files, "run_id": run_id}
    refuse_held(registry)
    refuse_another_champion(registry, instead_of)  # before the slow upload
    registry.make_model()
    registry.store(challenger.folder, **upload)
    tags = lineage_tags(
        origin,
        card=read_json(paths.stage("curate") / "card.json"),
        evaluation=challenger.evaluation,
        weights=challenger.weights,
        description=environment.describe(),
        drift=accepted_changes(paths),
        reason=reason_text(read_reasons(paths)) if run_id else BY_HAND,  # else those there are of a run that died
    )
    with TemporaryDirectory() as folder:
        lineage = write_lineage(paths, challenger, decision, origin, Path(folder))
        with lock_registry(registry) as lock:
            refuse_held(registry)
            refuse_another_champion(registry, instead_of)
            withdraw_decided_again(registry, lock, challenger.files)
            version = registry.register(
                challenger.folder,
                weights=challenger.weights,
                tags=tags,
                lineage=lineage,
                check=lock.check,
                **upload,
            )
            if decision["decision"] == "promote":
                _refuse_missing_files(registry, version)
                make_champion(registry, lock, version, promotion_event(decision))
                withdraw_stale(registry, lock, version)
            else:
                record_waiting(registry, lock, version, decision=decision, against=instead_of)
    return registry.version(version.version) or version


def find_unrecorded_decision(challenger: Challenger, conditions: Conditions) -> dict[str, Any] | None:
    """The decision that made the challenger champion, where the run that published it was killed before decision.json.
    None where it was made on other episodes than today's.
    """
    registry, champion = conditions.registry, conditions.champion
    if champion is None or champion.identity != challenger.files:
        return None
    row = registered_decision(registry, champion)
    row = row and with_approval(registry, champion, row)
    if row is None or row["decision"] != "promote":
        return None
    if ((row.get("measurement") or {}).get("challenger") or {}).get("key") != conditions.key(challenger.files):
        return None
    file = conditions.paths.stage("promote") / DECISION_FILE
    written = read_json(file) if file.exists() else {}
    if written.get("decided_at", "") >= row["decided_at"] and written.get("approval") != "waiting":
        return None
    warning = f"This was decided and published at {row['decided_at']}; its record is written only now."
    return {**row, "warnings": [*row["warnings"], warning]}


def with_approval(registry: Registry, version: Version, row: Mapping[str, Any]) -> dict[str, Any]:
    """The decision registered with a version, after a person's approval where it waited and got one."""
    from tasks.tracking.waiting import approval_of

    approval = approval_of(registry, version, row["decided_at"]) if row.get("approval") == "waiting" else None
    if approval is None:
        return dict(row)
    return approve_row(row, ManualOverride("approve", approval.body["reason"], approval.by))


def _refuse_missing_files(registry: Registry, version: Version) -> None:
    problem = registry.missing_files(version)
    if problem:
        raise ValueError(
            f"{version.name}: {problem}, though it was just registered; nothing was moved. Look at "
            f"{registry.settings.artifact_location}, then run `python -m tasks promote` again."
        )


def write_lineage(
    paths: Paths, challenger: Challenger, decision: Mapping[str, Any], origin: Origin, folder: Path
) -> Path:
    """The files of a version's lineage; those that a project does not have are left out."""
    from tasks.tracking.versions import PROVENANCE_FILE, TRAJECTORIES_FILE

    write_json(folder / DECISION_FILE, dict(decision))
    (folder / PARAMS_FILE).write_text(origin.params_text, encoding="utf-8")
    if origin.lock is not None:
        (folder / LOCK_FILE).write_bytes(origin.lock)
    write_json(folder / PROVENANCE_FILE, origin.records)
    for file in (paths.stage("evaluate") / "evaluation.json", paths.stage("curate") / "card.json"):
        shutil.copyfile(file, folder / file.name)
    write_trained_on(folder, read_trained_on(challenger.folder))
    packed = gzip.compress(challenger.episodes.read_bytes(), mtime=0)  # no time in it: equal rows, equal file
    (folder / TRAJECTORIES_FILE).write_bytes(packed)
    return folder


def promotion_event(decision: Mapping[str, Any]) -> dict[str, Any]:
    from tasks.tracking.history import ANCHOR, DECIDED_AT

    anchor, override = decision.get("anchor"), decision.get("override")
    stays = anchor["version"] if anchor and not anchor["is_next"] else None
    event = {"event": "promotion", DECIDED_AT: decision["decided_at"], ANCHOR: stays}
    if override:
        return {**event, "override": override["kind"], "reason": override["reason"]}
    return {**event, "reason": " ".join(decision["reasons"])}
