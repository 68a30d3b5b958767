"""promote: the best snapshot against the reigning champion on `test`; an MLflow version with the alias, or a clear no.

Reads what `evaluate` and `train` left, the registry and the environment; writes decision.json and decision.html, which
hold the verdict, the reasons in plain sentences and every number they rest on. Not a DVC stage: it has a side effect.
How the decision is made is in `judgement.py`, how it is carried out in `publish.py`. Left out: the way back, which is
`rollback`.
"""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasks.core.files import file_hash
from tasks.core.settings import Paths
from tasks.drift.pin import DriftCheck, accepted_changes, check_pin
from tasks.stages.promote.allowance import count_looks
from tasks.stages.promote.challenger import Challenger, read_challenger, refuse_another_world, todays_conditions
from tasks.stages.promote.decision import Decision
from tasks.stages.promote.decision_files import DECISION_FILE, describe_version, record_outcome
from tasks.stages.promote.judgement import decide
from tasks.stages.promote.origin import read_origin
from tasks.stages.promote.overrides import ManualOverride
from tasks.stages.promote.publish import settle
from tasks.stages.promote.settings import PromoteSections

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version


SETTINGS = PromoteSections


def run(settings: PromoteSections, paths: Paths, override: ManualOverride | None = None) -> None:
    """Decide, act on the registry (`publish.py`), then write decision.json: it never announces what did not happen."""
    from tasks.environments.catalog import load_environment

    challenger = read_challenger(paths, num_threads=settings.num_threads)
    checked = check_pin(settings.environment, paths, stage="promote")
    origin = read_origin(paths)
    with closing(load_environment(settings.environment)) as environment:
        refuse_another_world(paths, challenger, environment.fingerprint(), checked)
        conditions = todays_conditions(settings, paths, challenger, environment, checked)

        def count_and_decide(champion: Version | None, registry: Registry) -> tuple[Decision, Challenger]:
            count_looks(registry, paths, evaluation=file_hash(challenger.episodes))
            return decide(settings, challenger, champion, registry, conditions, override)

        row, version, after = settle(
            settings.tracking,
            settings.promote.model_name,
            challenger,
            conditions,
            origin,
            record=paths.stage("promote") / DECISION_FILE,
            decide=count_and_decide,
            describe=lambda decision, measured, champion: decision_row(
                settings, paths, measured, checked, decision, champion
            ),
        )
    record_outcome(paths, row, version, after)


def decision_row(
    settings: PromoteSections,
    paths: Paths,
    challenger: Challenger,
    checked: DriftCheck,
    decision: Decision,
    before: Version | None,
) -> dict[str, Any]:
    """The verdict, why, every number used, and the champion before; what the registry keeps with a version."""
    return {
        **decision.to_row(),
        "decided_at": now(),
        "model": settings.promote.model_name,
        "challenger": {
            "snapshot": challenger.snapshot,
            "weights": challenger.weights,
            "files": challenger.files,
            # Of a LoRA adapter: before it was merged.
            "evaluated": challenger.evaluation["weights"]["best"],
            "evaluated_files": challenger.evaluation["folders"]["best"],
        },
        "policy": settings.promote.model_dump(exclude={"model_name"}),
        "test": challenger.evaluation["test"],
        "select": challenger.evaluation["select"][challenger.snapshot],
        "environment": {
            "fingerprint": checked.fingerprint,
            "accepted_drift": accepted_changes(paths),
            "differs_from_champion": list(decision.differing_fields),
        },
        "champion_before": describe_version(before),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")  # in seconds, two decisions could be of one moment
