"""A decision carried out: the challenger registered with its lineage, and made champion if it still meets the champion
it was compared with.

Its weights are uploaded first, which may take long; then, while nobody else moves aliases, the champion is looked at
again, the version made and the aliases moved. So of two promotions at once one wins and the other is refused, however
long each took to decide. Who is to become champion is `promote/stage.py`'s question, how aliases move `aliases.py`'s.

decision.json goes into the version as it stands before: without the champion after, which the aliases tell. A promotion
that was killed after it moved them, and before decision.json was written, gets that file from there.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_json, write_json
from tasks.core.provenance import LOCK_FILE
from tasks.core.settings import PARAMS_FILE, Paths
from tasks.drift.pin import accepted_changes
from tasks.models.trained_on import read_trained_on, write_trained_on
from tasks.stages.promote.decision import approved
from tasks.stages.promote.episodes import Conditions, registered_decision
from tasks.stages.promote.overrides import ManualOverride
from tasks.tracking.settings import TrackingSettings

if TYPE_CHECKING:
    from tasks.core.provenance import Origin
    from tasks.stages.promote.challenger import Challenger
    from tasks.stages.promote.decision import Decision
    from tasks.tools.base import Environment
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version


def settle(
    tracking: TrackingSettings,
    model: str,
    challenger: Challenger,
    conditions: Conditions,
    origin: Origin,
    *,
    record: Path,
    decide: Callable[[Version | None, Registry], tuple[Decision, Challenger]],
    describe: Callable[[Decision, Challenger, Version | None], dict[str, Any]],
) -> tuple[dict[str, Any], Version | None, Version | None]:
    """The decision against the reigning champion, carried out: what decision.json holds so far, the challenger's
    version where it is registered, and the champion after.

    `origin` is what the challenger was made with. `decide` also gives the challenger with the episodes it was decided
    on, `describe` that row from both and the champion before; `record` is where it is written in the end. A row that
    `expires` gets its challenger registered, to wait for a person.
    """
    from tasks.tracking.aliases import current_champion, open_registry
    from tasks.tracking.waiting import end_stale_waiting

    registry = open_registry(tracking, model)
    before = current_champion(registry)
    registry.make_model()
    end_stale_waiting(registry, before)
    if before is not None and before.identity == challenger.files:
        unwritten = decision_without_record(registry, before, record, conditions.key(challenger.files))
        if unwritten:
            return unwritten, before, before
    decision, challenger = decide(before, registry)
    row = describe(decision, challenger, before)
    if row["verdict"] != "promote" and row["expires"] is None:
        return row, registry.find(challenger.files), before
    paths, environment = conditions.paths, conditions.environment
    version = carry_out(paths, challenger, registry, environment, origin, decision=row, instead_of=before)
    return row, version, version if row["verdict"] == "promote" else before


def decision_without_record(registry: Registry, champion: Version, record: Path, key: str) -> dict[str, Any] | None:
    """The decision that made `champion`, where it rests on today's episodes and `record` is missing or older."""
    row = registered_decision(registry, champion)
    if row is not None and row["approval"] == "waiting":
        row = _with_approval(registry, champion, row)
    if row is None or row["verdict"] != "promote":
        return None
    if ((row.get("measurement") or {}).get("challenger") or {}).get("key") != key:
        return None
    written = read_json(record) if record.exists() else {}
    if written.get("decided_at", "") >= row["decided_at"] and written.get("approval") != "waiting":
        return None
    told = f"This was decided and carried out at {row['decided_at']}; its record is written only now."
    return {**row, "warnings": [*row["warnings"], told]}


def _with_approval(registry: Registry, champion: Version, row: Mapping[str, Any]) -> dict[str, Any]:
    """A decision that waited, with the approval that it got since."""
    from tasks.tracking.waiting import approval_of

    approval = approval_of(registry, champion, row["decided_at"])
    return approved(row, ManualOverride("approve", approval.body["reason"], approval.by)) if approval else dict(row)


def carry_out(
    paths: Paths,
    challenger: Challenger,
    registry: Registry,
    environment: Environment,
    origin: Origin,
    *,
    decision: Mapping[str, Any],
    instead_of: Version | None,
) -> Version:
    """Register the challenger, and make it champion, or give it the alias `challenger` where the decision waits for
    approval; the version as it is then.

    `decision` is what decision.json holds so far, `instead_of` the champion it was made against. ValueError, and
    nothing moved, where the champion is another by now.
    """
    from tasks.tracking.aliases import lock_registry, make_champion, refuse_another_champion
    from tasks.tracking.history import refuse_held
    from tasks.tracking.metrics import RUN_ID_VARIABLE
    from tasks.tracking.waiting import record_waiting, withdraw_decided_again, withdraw_stale

    run_id = os.environ.get(RUN_ID_VARIABLE) or None
    named: dict[str, Any] = {"folder_hash": challenger.files, "run_id": run_id}
    refuse_held(registry)
    refuse_another_champion(registry, instead_of)  # sooner than after the upload
    registry.make_model()
    registry.store(challenger.folder, **named)
    tags = _tags(paths, challenger, environment, origin)
    with TemporaryDirectory() as folder:
        lineage = lineage_folder(paths, challenger, decision, origin, Path(folder))
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
                **named,
            )
            if decision["verdict"] == "promote":
                _refuse_missing_files(registry, version)
                make_champion(registry, lock, version, promotion_event(decision))
                withdraw_stale(registry, lock, version)
            else:
                record_waiting(registry, lock, version, decision=decision, against=instead_of)
    return registry.version(version.version) or version


def _refuse_missing_files(registry: Registry, version: Version) -> None:
    problem = registry.missing_files(version)
    if problem:
        raise ValueError(
            f"{version.name}: {problem}, though it was just registered; nothing was moved. Look at "
            f"{registry.settings.artifact_location}, then run `python -m tasks promote` again."
        )


def lineage_folder(
    paths: Paths, challenger: Challenger, decision: Mapping[str, Any], origin: Origin, folder: Path
) -> Path:
    """The files that tell where a version came from; what a project does not have is left out."""
    from tasks.tracking.versions import PROVENANCE_FILE, TRAJECTORIES_FILE

    write_json(folder / "decision.json", dict(decision))
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
    """What the version's history says of a decision: the override of a person where there was one, else the reasons."""
    from tasks.tracking.history import anchor_event

    anchor, override = decision.get("anchor"), decision.get("override")
    stays = anchor["version"] if anchor and not anchor["is_next"] else None
    event = {"event": "promotion", **anchor_event(stays)}
    if override:
        return {**event, "override": override["kind"], "reason": override["reason"]}
    return {**event, "reason": " ".join(decision["reasons"])}


def _tags(paths: Paths, challenger: Challenger, environment: Environment, origin: Origin) -> dict[str, str]:
    from tasks.tracking.lineage import lineage_tags

    return lineage_tags(
        origin,
        card=read_json(paths.stage("curate") / "card.json"),
        evaluation=challenger.evaluation,
        weights=challenger.weights,
        description=environment.describe(),
        drift=accepted_changes(paths),
    )
