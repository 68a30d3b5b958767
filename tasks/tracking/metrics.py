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

from tasks.core.records import BY_ENVIRONMENT, MEAN_PARTS
from tasks.core.terminal import tell
from tasks.core.text import one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric


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
# fail in seconds, not after MLflow's seven retries. One that answered before is waited for: 6 retries are two minutes.
RETRIES_VARIABLE = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
    RETRIES_VARIABLE: "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # with a server: two lines at the end of each run
}
RETRIES_IN_A_RUN = "6"
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's own name: [{"path": …, "type": "table"}]


def quiet_mlflow() -> None:
    """Call before any import of MLflow, which reads these then and otherwise writes a file to the user's home."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def wait_for_restarts() -> None:
    """From now on this process and its children wait for a server that is down, unless the user said how long."""
    if os.environ.get(RETRIES_VARIABLE) == QUIET[RETRIES_VARIABLE]:
        os.environ[RETRIES_VARIABLE] = RETRIES_IN_A_RUN


def wait_no_longer() -> None:
    """The run has failed, and only its end is still to be recorded."""
    if os.environ.get(RETRIES_VARIABLE) == RETRIES_IN_A_RUN:
        os.environ[RETRIES_VARIABLE] = QUIET[RETRIES_VARIABLE]


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
    """The curves, those of each environment of a mixture, and of each part of the reward."""
    step = int(row[step_key])
    nested = [point for name in (BY_ENVIRONMENT, MEAN_PARTS) for point in numbers(row.get(name, {}), name, step)]
    return [*numbers({name: row[name] for name in CURVES if name in row}, "", step), *nested]


def metric_name(name: str) -> str:
    """MLflow takes letters, digits and `_-./: ` only."""
    return "".join(letter if letter.isalnum() or letter in "_-./: " else "_" for letter in name)


def log_points(client: MlflowClient, run_id: str, points: list[Point]) -> None:
    _log_metrics(client, run_id, _metrics(points))


def _metrics(points: list[Point]) -> list[Metric]:
    """With the present time. MLflow stores a metric that is sent again with the same time only once."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    return [Metric(point.key, point.value, now, point.step) for point in points]


def _log_metrics(client: MlflowClient, run_id: str, metrics: list[Metric]) -> None:
    """In batches: one metric at a time costs 100 ms each through a server."""
    for start in range(0, len(metrics), MAX_BATCH_METRICS):
        client.log_batch(run_id, metrics=metrics[start : start + MAX_BATCH_METRICS])


def live_logger(env: Mapping[str, str]) -> Callable[[dict[str, Any]], None] | None:
    """A function that sends one row of train/metrics.jsonl to the run that the flow named in `env`; None where none is
    named.

    MLflow is imported and called in a thread, a batch every few seconds, so no iteration waits for it. What it does not
    take is kept and sent with a later batch. What is lost all the same (the process was killed) the flow logs from the
    file after the stage.
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
        kept: list[Metric] = []
        is_last = is_told = False
        client: MlflowClient | None = None
        while not is_last:
            is_last = self.is_closing.wait(self.BATCH_SECONDS)
            try:
                quiet_mlflow()
                from mlflow import MlflowClient

                client = client or MlflowClient(self.uri)
                kept += _metrics([point for row in self._waiting_rows() for point in row_points(row, "iteration")])
                _log_metrics(client, self.run_id, kept)
                kept = []
            except Exception as error:
                # The run may be shorter than MLflow's import, and the interpreter exiting.
                if not is_told and not self.is_closing.is_set():
                    tell(f"MLflow did not take live metrics ({one_line(error)}); they are kept and sent later.")
                    is_told = True

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
