"""The program of one worker: makes the environment, then plays the episodes that it is told of, one call at a time.

    python -m tasks.tools.pool.worker FILE_DESCRIPTOR

The first message has the environment's settings and the function that makes it, `module:function`; after it come
`start`, `call`, `malformed_call`, `end_turn`, `verdict` and `close`, each with the number of its episode. Each is
answered under its own number: at once, or, where a tool waits, first with `waits` and later with the answer. Tools that
wait run beside each other as in one process; while one waits, the event loop that times them sends `beats`, which stop
where a tool blocks it. MemoryError ends the worker: whatever holds the memory goes with it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import resource
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from tasks.core import background
from tasks.core.records import Problem
from tasks.tools.base import Environment, Episode, ToolReply, Verdict
from tasks.tools.checks import without_exit
from tasks.tools.pool.messages import Frames, answer_row, error_row, frame

PIECE_BYTES = 1 << 18
FLUSH_SECONDS = 0.002  # answers to what came together leave together, unless they take longer
OUT_OF_MEMORY = 3  # exit status


class Worker:
    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.environment: Environment | BaseException = RuntimeError("it was not told what to play")
        self.episodes: dict[int, Episode | BaseException] = {}  # or why it has none
        self.waiting: set[int] = set()
        self.answers = bytearray()
        self.lock = threading.Lock()  # answers that were waited for come from other threads

    def run(self) -> None:
        """Until the other end closes."""
        frames = Frames()
        while piece := self.connection.recv(PIECE_BYTES):
            flushed = time.monotonic()
            for message in frames.take(piece):
                self._do(message)
                if time.monotonic() - flushed > FLUSH_SECONDS:
                    self._flush()
                    flushed = time.monotonic()
            self._flush()

    def _do(self, message: dict[str, Any]) -> None:
        try:
            answer = self._play(message) if "episode" in message else self._open(message)
        except (Exception, SystemExit) as error:
            end_if_out_of_memory(error)
            self._answer(message["id"], error_row(error))
            return
        if isinstance(answer, Future):
            self.waiting.add(message["id"])
            self._answer(message["id"], {"waits": True})
            answer.add_done_callback(partial(self._answer_later, message["id"]))
        else:
            self._answer(message["id"], answer)

    def _open(self, message: dict[str, Any]) -> Any:
        try:
            background.run(self._beat(message["beat_seconds"]))
            limit_memory(message["memory_bytes"])
            module, _, function = message["make"].partition(":")
            self.environment = getattr(importlib.import_module(module), function)(message["settings"])
        except (Exception, SystemExit) as error:  # each episode tells it
            self.environment = error
        return None

    def _play(self, message: dict[str, Any]) -> Any:
        number, step, given = message["episode"], message["do"], message["with"]
        if step == "start":
            self._start(number, *given)
            return None
        if step == "close":
            episode = self.episodes.pop(number, None)
            if episode is not None and not isinstance(episode, BaseException):
                episode.close()
            return None
        episode = self.episodes[number]
        if isinstance(episode, BaseException):
            raise episode
        try:
            with without_exit(episode, step):
                return getattr(episode, step)(*given)
        except Exception as error:
            if step == "end_turn":  # nobody waits for it: what comes next tells
                self.episodes[number] = error
            raise

    def _start(self, number: int, problem: dict[str, Any], stream: str) -> None:
        try:
            if isinstance(self.environment, BaseException):
                raise self.environment
            with without_exit(self.environment, "start"):
                self.episodes[number] = self.environment.start(Problem.model_validate(problem), stream=stream)
        except (Exception, SystemExit) as error:
            end_if_out_of_memory(error)
            self.episodes[number] = error

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            if self.waiting:
                with self.lock:
                    self.answers += frame({"beats": True})
                self._flush()

    def _answer_later(self, number: int, done: Future[ToolReply | Verdict]) -> None:
        self.waiting.discard(number)
        error = done.exception()
        end_if_out_of_memory(error)
        self._answer(number, error_row(error) if error is not None else done.result())
        self._flush()

    def _answer(self, number: int, found: ToolReply | Verdict | dict[str, Any] | None) -> None:
        """`found` is an answer, or a row of something else."""
        try:
            row = found if isinstance(found, dict) else answer_row(found)
            message = frame({"id": number, **row})
        except ValueError as error:
            message = frame(
                {"id": number, "fault": [f"its answer cannot be sent: {error}", "worker", "unavailable", 0]}
            )
        with self.lock:
            self.answers += message

    def _flush(self) -> None:
        with self.lock:
            pending, self.answers = self.answers, bytearray()
            if pending:
                self.connection.sendall(pending)


def limit_memory(num_bytes: int) -> None:
    """To the machine's own hard limit where that is lower: it cannot be raised."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def end_if_out_of_memory(error: BaseException | None) -> None:
    """The tool layer makes a fault of it, which the process would survive with its memory full."""
    if isinstance(error, MemoryError) or isinstance(getattr(error, "__cause__", None), MemoryError):
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    with suppress(ConnectionError, KeyboardInterrupt):  # the other end is gone
        Worker(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # a tool that never returns holds a thread
