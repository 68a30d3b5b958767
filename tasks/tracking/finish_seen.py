"""That MLflow shows this folder's last finished run as the last one, for as long as its database has the same bytes.

Importing MLflow takes seconds, and the same bytes give the same answer: so a second run with nothing changed asks DVC
alone. Left out is what more than the database decides: a server, a decision that waits (it expires), a drift check.
"""

from __future__ import annotations

from pathlib import Path

from tasks.core.files import content_hash, read_json, write_json
from tasks.core.settings import Paths
from tasks.tracking.finished_runs import FinishedRun, last_finished, read_kept
from tasks.tracking.measurements import read_checks
from tasks.tracking.settings import TrackingSettings

SEEN_FILE = "finish_seen.json"


def note_finish(settings: TrackingSettings, model: str, paths: Paths) -> None:
    """Ask MLflow, and write down that it knows no more than artifacts/finished.json; nothing where it does."""
    file = paths.artifacts / SEEN_FILE
    file.unlink(missing_ok=True)
    before = _hash(settings)  # before MLflow is asked: what another process stores meanwhile is not in its answer
    if before is None:
        return
    last = last_finished(settings, model, paths)
    if last is None or last.waits or last != read_kept(paths) or read_checks(settings, model):
        return
    if _hash(settings) == before:
        write_json(file, _seen(settings, model, last, before))


def recall_finish(settings: TrackingSettings, model: str, paths: Paths) -> FinishedRun | None:
    """What `last_finished` would say, where that was noted and the database did not change; without MLflow."""
    file, kept = paths.artifacts / SEEN_FILE, read_kept(paths)
    try:
        is_seen = (
            kept is not None and file.exists() and read_json(file) == _seen(settings, model, kept, _hash(settings))
        )
    except ValueError:  # damaged: MLflow is asked
        return None
    return kept if is_seen else None


def _seen(settings: TrackingSettings, model: str, last: FinishedRun, database: str | None) -> dict[str, str | None]:
    return {
        "database": database,
        "experiment": settings.experiment,
        "model": model,
        "run_id": last.run_id,
    }


def _hash(settings: TrackingSettings) -> str | None:
    database = _database(settings)
    return None if database is None else content_hash(database)


def _database(settings: TrackingSettings) -> Path | None:
    """MLflow's file, where that is all it knows: no server, and no journal beside it that is still to be read."""
    file = settings.database
    if file is None:
        return None
    journals = (file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-journal"))
    return file if file.exists() and not any(journal.exists() for journal in journals) else None
