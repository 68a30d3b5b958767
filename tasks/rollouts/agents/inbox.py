"""What an agent asks of its episode, from the gateway's thread to the collector's, in the order in which it arrives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tasks.gateway.completions import Completion, CompletionRequest, ProtocolError
from tasks.tools.base import ToolReply
from tasks.tools.driven import AgentEnd

MOST_WAITING = 64  # requests of one agent


class TurnFuture(Future[Completion]):
    """`is_left`: nobody waits for the turn any more, which is written all the same once it is begun."""

    is_left = False

    def cancel(self) -> bool:
        self.is_left = True
        return super().cancel()


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A turn."""

    request: CompletionRequest
    answer: TurnFuture = field(default_factory=TurnFuture)


@dataclass(frozen=True, slots=True, eq=False)
class Called:
    """A tool."""

    name: str
    arguments: Mapping[str, Any]
    answer: Future[ToolReply] = field(default_factory=Future)


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    end: Future[AgentEnd]


Event = Asked | Called | Ended


class Inbox:
    """One reader; any thread may put. Once closed, whoever asks is told that the episode has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Event] = deque()
        self._reader: Future[Event] | None = None
        self._is_closed = False

    def put(self, event: Event) -> None:
        """ProtocolError 429 where too many wait already."""
        with self._lock:
            if self._is_closed:
                _refuse(event)
                return
            if isinstance(event, Asked | Called) and len(self._waiting) >= MOST_WAITING:
                message = f"{MOST_WAITING} requests of this episode wait already; send fewer at once."
                raise ProtocolError(429, message, code="too_many_requests")
            reader, self._reader = self._reader, None
            if reader is None:
                self._waiting.append(event)
        if reader is not None:
            reader.set_result(event)

    def take(self) -> Future[Event]:
        found: Future[Event] = Future()
        with self._lock:
            if not self._waiting:
                self._reader = found
                return found
            event = self._waiting.popleft()
        found.set_result(event)
        return found

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
        for event in waiting:
            _refuse(event)


def unknown_key() -> ProtocolError:
    return ProtocolError(401, "This key belongs to no episode under way; use the one that the agent was started with.")


def _refuse(event: Event) -> None:
    if not isinstance(event, Ended) and event.answer.set_running_or_notify_cancel():
        event.answer.set_exception(unknown_key())
