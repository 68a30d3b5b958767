"""MLflow's runs, written in one background thread: its first call takes seconds, which no stage should wait for.

Calls keep their order. Only a stage that logs while it runs waits, for the run id that it gets by environment
variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from flows.steps import StageRun
from tasks.core.settings import Paths, load
from tasks.tracking.connection import absolute_uri
from tasks.tracking.metrics import RUN_ID_VARIABLE, URI_VARIABLE
from tasks.tracking.runs import FlowRuns
from tasks.tracking.settings import TrackingSections, TrackingSettings

LOGS_WHILE_RUNNING = ("train", "promote")


def tracking_settings(params: dict[str, Any]) -> TrackingSettings:
    return load(TrackingSections, params).tracking


class RunLogger:
    """The parent run and its children. An error that leaves the block closes the open runs as FAILED or KILLED."""

    def __init__(
        self, settings: TrackingSettings, params: Mapping[str, Any], paths: Paths, *, name: str, prefect_run: str
    ):
        self._runs = FlowRuns(settings, params, paths, name=name, prefect_run=prefect_run)
        self._uri = absolute_uri(settings)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._calls: list[Future[Any]] = []

    def __enter__(self) -> RunLogger:
        self._begun = self._call(self._runs.begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            status = "FAILED" if isinstance(error, Exception) else "KILLED"
            with suppress(Exception):  # the error that ended the block matters more
                self._call(self._runs.fail, status).result()
        self._thread.shutdown()

    def run_id(self) -> str:
        return str(self._begun.result())

    def run_page(self) -> str | None:
        """Its address, where MLflow is a server."""
        run_id = self.run_id()
        is_server = self._uri.startswith("http")
        return f"{self._uri.rstrip('/')}/#/experiments/{self._runs.experiment_id}/runs/{run_id}" if is_server else None

    def begin_stage(self, stage: str) -> dict[str, str]:
        """Open a stage's run; returns the environment variables that the stage needs."""
        call = self._call(self._runs.begin_stage, stage)
        if stage not in LOGS_WHILE_RUNNING:
            return {}
        self._raise_first_fault(waiting=True)
        return {RUN_ID_VARIABLE: call.result(), URI_VARIABLE: self._uri}

    def end_stage(self, run: StageRun) -> None:
        self._call(self._runs.end_stage, run.stage, cached=run.is_cached, seconds=run.seconds)
        self._raise_first_fault(waiting=False)

    def log_traces(self) -> None:
        self._call(self._runs.log_traces)

    def finish(self) -> None:
        self._call(self._runs.finish)
        self._raise_first_fault(waiting=True)

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        self._calls.append(self._thread.submit(method, *args, **kwargs))
        return self._calls[-1]

    def _raise_first_fault(self, *, waiting: bool) -> None:
        """Raise the error of the first call that failed; later errors only follow from it."""
        for call in self._calls:
            if waiting or call.done():
                call.result()
