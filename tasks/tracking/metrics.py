"""Numbers as MLflow metrics: flattened, in batches, and live while `train` runs.

Imports nothing else of tracking: `train` uses `live_logger`, and DVC must not retrain because the registry changed.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.terminal import tell
from tasks.core.text import one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient


RUN_ID_VARIABLE = "TURNWISE_MLFLOW_RUN_ID"  # the run a stage logs to; the flow sets both for its children
URI_VARIABLE = "MLFLOW_TRACKING_URI"
MAX_BATCH_METRICS = 1000  # MLflow's own limit of one log_batch
MAX_METRICS = 20  # of a run: with hundreds, its page and the table of runs show nothing
# The curves: these keys of metrics.jsonl. A table of the run has all keys.
CURVES = (
    "success_rate", "mean_reward", "mean_sampled_tokens", "mean_thinking_tokens", "mean_turns",
    "informative_group_share", "overlong_share", "entropy", "repetition", "loss", "kl", "clip_share", "ratio_max",
    "mismatch_mean", "mismatch_weight_max", "grad_norm", "learning_rate", "optimizer_steps",
)  # fmt: skip
# No telemetry; without HF_HUB_OFFLINE logging a model waited 48 s for a network (measured); a server that is down must
# fail in seconds, not after MLflow's seven retries.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's own name: [{"path": …, "type": "table"}]


def quiet_mlflow() -> None:
    """Call before any import of MLflow, which reads these then and otherwise writes a file to the user's home."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def flatten(value: Any, prefix: str = "", separator: str = ".") -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of nested mappings; lists are leaves."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, item in value.items():
        yield from flatten(item, f"{prefix}{separator}{name}" if prefix else str(name), separator)


class Point(NamedTuple):
    """One value of one metric; `step` is an iteration, an optimizer step or 0, as the stage counts."""

    key: str
    value: float
    step: int


def numbers(value: Any, prefix: str, step: int) -> list[Point]:
    """Every finite number in `value` as a metric named by its path; anything else is skipped."""
    return [
        Point(metric_name(key), float(leaf), step)
        for key, leaf in flatten(value, prefix, "/")
        if isinstance(leaf, int | float) and math.isfinite(leaf)
    ]


def row_points(row: Mapping[str, Any], step_key: str) -> list[Point]:
    return numbers({name: row[name] for name in CURVES if name in row}, "", int(row[step_key]))


def metric_name(name: str) -> str:
    """MLflow takes letters, digits and `_-./: ` only."""
    return "".join(letter if letter.isalnum() or letter in "_-./: " else "_" for letter in name)


def log_points(client: MlflowClient, run_id: str, points: list[Point]) -> None:
    """In batches: one metric at a time costs 100 ms each through a server."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    rows = [Metric(point.key, point.value, now, point.step) for point in points]
    for start in range(0, len(rows), MAX_BATCH_METRICS):
        client.log_batch(run_id, metrics=rows[start : start + MAX_BATCH_METRICS])


def live_logger(env: Mapping[str, str]) -> Callable[[dict[str, Any]], None] | None:
    """A function that sends one row of train/metrics.jsonl to the run that the flow named in `env`; None where none is
    named.

    MLflow is imported and called in a thread, a batch every few seconds, so no iteration waits for it. Whatever is lost
    (server down, process killed) the flow logs again from the file after the stage.
    """
    if not env.get(RUN_ID_VARIABLE) or not env.get(URI_VARIABLE):
        return None
    return _LiveLogger(env[RUN_ID_VARIABLE], env[URI_VARIABLE])


class _LiveLogger:
    BATCH_SECONDS = 3.0
    FLUSH_SECONDS = 10.0  # how long the end of the process waits for the last batch

    def __init__(self, run_id: str, uri: str):
        self.run_id, self.uri = run_id, uri
        self.rows: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.is_closing = threading.Event()
        self.thread = threading.Thread(target=self._work, name="mlflow-live", daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def __call__(self, row: dict[str, Any]) -> None:
        self.rows.put(row)

    def close(self) -> None:
        self.is_closing.set()
        self.thread.join(self.FLUSH_SECONDS)

    def _work(self) -> None:
        # Broad on purpose: a tracking fault must never end training, and the flow logs again what is lost.
        try:
            quiet_mlflow()
            from mlflow import MlflowClient

            client = MlflowClient(self.uri)
            while True:
                is_last = self.is_closing.wait(self.BATCH_SECONDS)
                points = [point for row in self._waiting_rows() for point in row_points(row, "iteration")]
                if points:
                    log_points(client, self.run_id, points)
                if is_last:
                    return
        except Exception as error:
            if self.is_closing.is_set():  # the run was shorter than MLflow's import, and the interpreter is exiting
                return
            tell(f"MLflow did not take live metrics ({one_line(error)}); the flow logs them later.")

    def _waiting_rows(self) -> Iterator[dict[str, Any]]:
        while not self.rows.empty():
            yield self.rows.get()


def log_table(client: MlflowClient, run_id: str, file: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """`rows` as the table `file` of a run, replacing an earlier one; a column per key of any row."""
    if not rows:
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[_plain(row.get(name)) for name in columns] for row in rows]
    client.log_dict(run_id, {"columns": columns, "data": data}, file)
    known = json.loads(client.get_run(run_id).data.tags.get(TABLES_TAG, "[]"))
    entry = {"path": file, "type": "table"}
    if entry not in known:
        client.set_tag(run_id, TABLES_TAG, json.dumps([*known, entry]))


def _plain(value: Any) -> Any:
    """Nested values as text, since MLflow shows an object as one letter after another."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
