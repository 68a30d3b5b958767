"""One worker as the main process sees it: it is asked, answers by Futures, and may die, fall silent or send nonsense.

All sockets are read and written on the event loop of `core/background.py`, so asking never blocks. A worker that ends
breaks the Futures of its questions: an EnvironmentFault of the episodes it had. The next episode starts another.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tasks
from tasks.core import background
from tasks.core.child_processes import ChildProcess
from tasks.tools.base import EnvironmentFault
from tasks.tools.pool.messages import BadFrame, Frames, frame, read_answer

LOOK_SECONDS = 0.5
BEATS_PER_LIMIT, MAX_BEAT_SECONDS = 4, 0.5
EXIT_SECONDS = 5.0  # between the end of its connection and its own
START_SECONDS = 300.0  # to import the environment and make it


@dataclass(frozen=True, slots=True)
class Question:
    step: str
    answer: Future[Any] = field(default_factory=Future)


class WorkerProcess(asyncio.Protocol):
    """`end` is how it ended, None while it lives. `silent_seconds`: with a question open and no sign of life for so
    long, it hangs and is ended. A question that waits for its tool has been heard; then the event loop on which tools
    wait, and which times them, has to give signs of its own: late answers and, a few times per limit, a beat.
    """

    def __init__(self, opening: dict[str, Any], *, silent_seconds: float):
        self.silent_seconds = silent_seconds
        self.end: str | None = None
        self.num_asked = 0
        self.unheard: dict[int, Question] = {}
        self.waiting: dict[int, Question] = {}
        self.frames = Frames()
        self.last_heard = time.monotonic() + START_SECONDS
        self.last_beat = 0.0
        self.transport: asyncio.WriteTransport | None = None
        self.unsent = bytearray()  # until it is connected
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(tasks.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self.child = ChildProcess(
                [sys.executable, "-m", "tasks.tools.pool.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        background.run(self._connect(ours))
        self.ask({**opening, "beat_seconds": min(silent_seconds / BEATS_PER_LIMIT, MAX_BEAT_SECONDS)})

    async def _connect(self, ours: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        self._look()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        transport.write(self.unsent)

    def ask(self, question: dict[str, Any]) -> Future[Any]:
        """ValueError if the question is no JSON or too long."""
        self.num_asked += 1
        number, asked = self.num_asked, Question(question.get("do", "open"))
        asked.answer.set_running_or_notify_cancel()  # a cancelled one takes no answer, which would end the reading
        message = frame({"id": number, **question})
        background.event_loop().call_soon_threadsafe(self._send, number, asked, message)
        return asked.answer

    def _send(self, number: int, asked: Question, message: bytes) -> None:
        if self.end is not None:
            asked.answer.set_exception(self._fault())
            return
        if not self.unheard:
            self.last_heard = max(self.last_heard, time.monotonic())
        self.unheard[number] = asked
        if self.transport is None:
            self.unsent += message
        else:
            self.transport.write(message)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.frames.take(data):
                self._take(message)
        except BadFrame as bad:
            self._stop(f"sent what cannot be read: {bad}")

    def _take(self, message: dict[str, Any]) -> None:
        if "beats" in message:
            self.last_beat = time.monotonic()
            return
        number = message.get("id")
        if type(number) is not int:
            raise BadFrame("its message has no number")
        if number in self.unheard:
            asked = self.unheard.pop(number)
            self.last_heard = time.monotonic()
            if "waits" in message:
                self.last_beat = self.last_beat if self.waiting else self.last_heard
                self.waiting[number] = asked
                return
        elif number in self.waiting:
            asked = self.waiting.pop(number)
            self.last_beat = time.monotonic()
        else:
            raise BadFrame("it answers what was not asked")
        try:
            found = read_answer(message, asked.step)
        except BadFrame:
            self.waiting[number] = asked
            raise
        except Exception as error:
            asked.answer.set_exception(error)
            return
        asked.answer.set_result(found)

    def connection_lost(self, error: Exception | None) -> None:
        if self.end is None:
            background.run(self._tell_end())

    async def _tell_end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.child.process.wait, EXIT_SECONDS)
        self._stop("closed its connection" if self.child.is_alive() else self.child.how_it_ended())

    def _look(self) -> None:
        if self.end is not None:
            return
        if not self.child.is_alive():  # what it started may hold its end of the connection open
            self._stop(self.child.how_it_ended())
            return
        silent = self._silent_seconds()
        if silent > self.silent_seconds:
            self._stop(f"gave no sign of life for {silent:.0f} s")
            return
        background.event_loop().call_later(LOOK_SECONDS, self._look)

    def _silent_seconds(self) -> float:
        """0 where nothing was asked."""
        signs = [self.last_heard] * bool(self.unheard) + [self.last_beat] * bool(self.waiting)
        return time.monotonic() - min(signs, default=time.monotonic())

    def close(self) -> None:
        background.event_loop().call_soon_threadsafe(self._stop, "was closed")
        self.child.stop()

    def _stop(self, how: str) -> None:
        """On the event loop."""
        if self.end is not None:
            return
        self.end = how
        if self.transport is not None:
            self.transport.abort()
        asyncio.get_running_loop().run_in_executor(None, self.child.stop)
        for asked in [*self.unheard.values(), *self.waiting.values()]:
            asked.answer.set_exception(self._fault())
        self.unheard.clear()
        self.waiting.clear()

    def _fault(self) -> EnvironmentFault:
        return EnvironmentFault(f"the process that played the episode {self.end}", tool="worker")
