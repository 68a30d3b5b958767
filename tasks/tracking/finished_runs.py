"""Why the present run is at work, and what the last finished run of a model ran with.

A run counts as done when it finished: then its parent run in MLflow has what DVC recorded (`dvc.lock`) and promote's
settings as `finished.json`, so that another machine knows it too. artifacts/finished.json is the same, readable without
a server. artifacts/run_reasons.json is there from a run's start to its end; what a killed run left is taken up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_json, write_json
from tasks.core.params_text import read_as_dvc
from tasks.core.provenance import LOCK_FILE
from tasks.core.settings import PARAMS_FILE, Paths
from tasks.core.text import one_line
from tasks.tracking.connection import connect, mlflow_errors
from tasks.tracking.settings import TrackingSettings

if TYPE_CHECKING:
    from mlflow import MlflowClient

FINISHED_FILE, REASONS_FILE = "finished.json", "run_reasons.json"
MODEL_TAG, REASON_TAG, KINDS_TAG = "model", "reason", "reason_kinds"
FINISHED_TAG = "finished_file"  # of a parent run: it has FINISHED_FILE
BY_HAND = "none: promoted by hand, without a flow"
WAITS = ", waits for approval"
CLOCKS_DIFFER = 600_000  # milliseconds by which clocks of machines may differ
MAX_REASON = 4900  # characters of a tag; MLflow and its databases take 5,000

Inputs = dict[str, Any]  # "stages": {stage: {"cmd", "params", "deps"}} as in dvc.lock, and promote's section


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A finished run: its id in MLflow, when it began and ended (UTC, ISO), its outcome, and what it ran with."""

    run_id: str
    began_at: str
    finished_at: str
    outcome: str
    reason_kinds: list[str]
    champion: int | None
    inputs: Inputs

    @property
    def waits(self) -> bool:
        """Whether it ended with a decision that waited for approval."""
        return self.outcome.endswith(WAITS)

    @property
    def name(self) -> str:
        return f"run {self.run_id[:8]} of {self.finished_at[:16].replace('T', ' ')} UTC"


def inputs_now(promote: Mapping[str, Any]) -> Inputs:
    """What dvc.lock says each stage ran with, results of other stages aside, and the section `promote`."""
    lock = (read_as_dvc(LOCK_FILE.read_bytes()) or {}).get("stages", {}) if LOCK_FILE.exists() else {}
    made = {out["path"] for entry in lock.values() for out in entry.get("outs") or []}
    stages = {
        stage: {
            "cmd": entry.get("cmd"),
            "params": (entry.get("params") or {}).get(str(PARAMS_FILE), {}),
            "deps": {
                item["path"]: item.get("md5")
                for item in entry.get("deps") or []
                if not any(Path(item["path"]).is_relative_to(out) for out in made)
            },
        }
        for stage, entry in lock.items()
    }
    return {"stages": stages, "promote": dict(promote)}


def write_reasons(paths: Paths, rows: list[dict[str, str]]) -> None:
    """Say why the run that starts now is at work: rows with `kind` and `text`."""
    write_json(paths.artifacts / REASONS_FILE, rows)


def read_reasons(paths: Paths) -> list[dict[str, str]]:
    """Why the present run, or one that did not finish, is at work; none where there is no such run."""
    file = paths.artifacts / REASONS_FILE
    try:
        return (
            [{"kind": str(row["kind"]), "text": str(row["text"])} for row in read_json(file)] if file.exists() else []
        )
    except (ValueError, KeyError, TypeError):  # damaged: what else changed is still found
        return []


def reason_tags(paths: Paths) -> dict[str, str]:
    """For the parent run in MLflow, from `write_reasons`."""
    rows = read_reasons(paths)
    if not rows:
        return {}
    return {REASON_TAG: reason_text(rows), KINDS_TAG: " ".join(dict.fromkeys(row["kind"] for row in rows))}


def reason_text(rows: list[dict[str, str]]) -> str:
    return one_line("; ".join(row["text"] for row in rows), MAX_REASON) or BY_HAND


def record_finished(client: MlflowClient, run_id: str, promote: Mapping[str, Any], paths: Paths) -> FinishedRun:
    """Store what the run that ends now ran with, with its parent run. `keep_finished` then writes it here."""
    run, outcome = client.get_run(run_id), _read_outcome(paths)
    finished = FinishedRun(
        run_id=run_id,
        began_at=_utc(run.info.start_time),
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        outcome=_describe(outcome),
        reason_kinds=str(run.data.tags.get(KINDS_TAG, "")).split(),
        champion=outcome.get("champion"),
        inputs=inputs_now(promote),
    )
    with TemporaryDirectory() as folder:
        write_json(Path(folder) / FINISHED_FILE, asdict(finished))
        client.log_artifact(run_id, str(Path(folder) / FINISHED_FILE))
    client.set_tag(run_id, FINISHED_TAG, FINISHED_FILE)
    return finished


def keep_finished(finished: FinishedRun, paths: Paths) -> None:
    """Write the record into this folder too, and end the present run's reasons."""
    write_json(paths.artifacts / FINISHED_FILE, asdict(finished))
    (paths.artifacts / REASONS_FILE).unlink(missing_ok=True)


def read_kept(paths: Paths) -> FinishedRun | None:
    """The last finished run as this folder knows it, without MLflow."""
    file = paths.artifacts / FINISHED_FILE
    try:
        return FinishedRun(**read_json(file)) if file.exists() else None
    except (ValueError, TypeError):  # damaged: MLflow has it
        return None


def last_finished(settings: TrackingSettings, model: str, paths: Paths) -> FinishedRun | None:
    """The last finished run of a registered model, whatever machine it ran on; None before the first. One that ended
    under a clock in the future would else be the last one for years.
    """
    if settings.is_missing:
        return None
    with mlflow_errors(settings):
        client = connect(settings)
        experiment = client.get_experiment_by_name(settings.experiment)
        if experiment is None:
            return None
        where = (
            f"tags.kind = 'flow' and tags.{MODEL_TAG} = '{model}' and tags.{FINISHED_TAG} = '{FINISHED_FILE}' "
            f"and attributes.status = 'FINISHED'"
        )
        runs = _newest(client, experiment.experiment_id, f"{where} and attributes.end_time <= {_now() + CLOCKS_DIFFER}")
        runs = runs or _newest(client, experiment.experiment_id, where)  # where the clock of this machine is behind
        if not runs:
            return None
        kept, run_id = read_kept(paths), str(runs[0].info.run_id)
        return kept if kept is not None and kept.run_id == run_id else _fetch(client, run_id)


def _newest(client: MlflowClient, experiment: str, where: str) -> list[Any]:
    return list(client.search_runs([experiment], where, max_results=1, order_by=["attributes.end_time DESC"]))


def _fetch(client: MlflowClient, run_id: str) -> FinishedRun | None:
    """None where somebody deleted the file: then the next run is a first one."""
    from mlflow.exceptions import MlflowException

    with TemporaryDirectory() as folder:
        try:
            return FinishedRun(**read_json(Path(client.download_artifacts(run_id, FINISHED_FILE, folder))))
        except (MlflowException, OSError, ValueError, TypeError):
            return None


def _read_outcome(paths: Paths) -> dict[str, Any]:
    try:
        return dict(read_json(paths.stage("promote") / "outcome.json"))
    except ValueError:
        return {}


def _describe(outcome: Mapping[str, Any]) -> str:
    if outcome.get("decision") == "promote":
        return f"promoted version {outcome.get('registered_version')}"
    waits = WAITS if outcome.get("approval") == "waiting" else ""
    return f"{outcome.get('decision', 'no decision')}{waits}"


def _now() -> int:
    return int(datetime.now(UTC).timestamp() * 1000)


def _utc(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
