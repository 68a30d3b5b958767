"""An environment whose episodes are played in worker processes; each episode stays in the worker that it began in.

What is not of an episode (tools, problems, descriptions, users) is answered here, by an environment that starts no
episode. Which worker plays an episode depends on its problem and stream, and what it plays on nothing else, so the
number of workers changes no trajectory. Retries and injected faults are within a worker; the cache, the judge, users
and what a model sees of faults are around the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from itertools import count
from typing import Any
from zlib import crc32

from tasks.core.machine import GIB
from tasks.core.records import Problem
from tasks.core.settings import Settings
from tasks.core.text import counted
from tasks.tools.base import Environment, Episode, ToolReply, Verdict
from tasks.tools.pool.process import WorkerProcess
from tasks.tools.settings import PoolSettings
from tasks.tools.wrappers import EnvironmentWrapper


def why_it_stays(environment_class: type[Any]) -> str | None:
    """Why its episodes are played in this process all the same; None: they may be played elsewhere."""
    if getattr(environment_class, "has_processes", False):
        return "its servers are processes already"
    if getattr(environment_class, "start_user", Environment.start_user) is not Environment.start_user:
        return "its own start_user may share what an episode holds"
    return None


class PooledEnvironment(EnvironmentWrapper):
    """`make` is the `module:function` that makes the environment in a worker, from the settings as JSON."""

    def __init__(self, inner: Environment, settings: Settings, pool: PoolSettings, *, make: str):
        super().__init__(inner)
        self.pool, self.numbers = pool, count(1)
        memory = int(pool.memory_gib * GIB)
        self.opening = {"make": make, "settings": settings.model_dump(mode="json"), "memory_bytes": memory}
        self.workers: dict[int, WorkerProcess] = {}
        self.replaced: list[WorkerProcess] = []
        self.lock = threading.Lock()  # a cache that misses starts an episode on the event loop

    def start(self, problem: Problem, *, stream: str = "") -> Episode:
        place = crc32(f"{problem.id}/{stream}".encode()) % self.pool.num_workers
        return PooledEpisode(self._worker(place), next(self.numbers), problem, stream)

    def counts(self) -> dict[str, int]:
        return {**self.inner.counts(), "workers_ended": len(self.ended)}

    @property
    def ended(self) -> list[str]:
        """How workers ended that nobody closed."""
        return [worker.end for worker in (*self.replaced, *self.workers.values()) if worker.end is not None]

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        self.inner.close()

    def _worker(self, place: int) -> WorkerProcess:
        """Started when first needed, and again where it ended. ValueError where too many did."""
        with self.lock:
            worker = self.workers.get(place)
            if worker is not None and worker.end is None:
                return worker
            ended = self.ended
            if len(ended) > self.pool.max_restarts:
                raise ValueError(
                    f"{counted(len(ended), 'worker process', 'worker processes')} of the environment {self.inner.name} "
                    f"ended, more than environment.pool.max_restarts ({self.pool.max_restarts}) allows; the last one "
                    f"{ended[-1]}. Repair the tool that ends them, raise environment.pool.memory_gib "
                    f"({self.pool.memory_gib:g}) if they ran out of memory (status 3), or set environment.pool to "
                    "null; finished episodes are kept."
                )
            if worker is not None:
                self.replaced.append(worker)
            self.workers[place] = WorkerProcess(self.opening, silent_seconds=self.inner.limits.timeout_seconds)
            return self.workers[place]


class PooledEpisode:
    """Every answer is a Future; where the worker ended, it is broken by an EnvironmentFault."""

    def __init__(self, worker: WorkerProcess, number: int, problem: Problem, stream: str):
        self.worker, self.number = worker, number
        self._ask("start", problem.model_dump(), stream)

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[ToolReply]:
        return self._ask("call", name, dict(arguments))

    def malformed_call(self) -> Future[ToolReply]:
        return self._ask("malformed_call")

    def end_turn(self, message: str | None) -> None:
        self._ask("end_turn", message)

    def verdict(self, final_message: str | None) -> Future[Verdict]:
        return self._ask("verdict", final_message)

    def close(self) -> None:
        self._ask("close")

    def _ask(self, step: str, *given: Any) -> Future[Any]:
        return self.worker.ask({"episode": self.number, "do": step, "with": given})
