"""Which episode gets which session: its own, new or reset, or a shared one.

At most `max_servers` sessions are in use; later episodes wait, and their time limits do not run. At most one server per
core starts at a time, so that none exceeds its start limit because of the others.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from statistics import median
from weakref import WeakKeyDictionary

from tasks.core.secrets import Secrets
from tasks.environments.mcp.connector import Connector
from tasks.environments.mcp.messages import Listing
from tasks.environments.mcp.sessions import Session
from tasks.environments.mcp.settings import MCPSettings
from tasks.tools.base import EnvironmentFault

Prepare = Callable[[Session], Awaitable[None]]  # prepares a session for an episode


class Sessions:
    """All sessions of one environment; each must have the tools `names` as in `expected`."""

    may_replace = False  # whether a lost session may be replaced within an episode

    def __init__(self, connector: Callable[[], Connector], secrets: Secrets, settings: MCPSettings):
        self.connector, self.secrets, self.settings = connector, secrets, settings
        self.expected: Listing | None = None
        self.names: tuple[str, ...] = ()
        self.open_sessions: set[Session] = set()
        self._starting = asyncio.Semaphore(os.cpu_count() or 1)
        self._is_closed = False
        self._seconds: deque[tuple[float, float]] = deque(maxlen=64)  # of the last that ended: to start, and in all

    async def first(self) -> Listing:
        """Open the first session, for a later episode, and return its listing."""
        session = await self.open()
        self._keep(session)
        return session.listing

    def pin(self, listing: Listing, names: Iterable[str]) -> None:
        """From now on every session must have this server and these tools."""
        self.expected, self.names = listing, tuple(names)

    async def take(self, prepare: Prepare) -> Session:
        """A session ready for an episode; EnvironmentFault if none can be opened."""
        raise NotImplementedError

    async def give_back(self, session: Session) -> None:
        """The episode is over."""
        raise NotImplementedError

    async def open(self) -> Session:
        """A new session, which the caller keeps or ends."""
        async with self._starting:
            if self._is_closed:
                raise EnvironmentFault("the environment was closed", tool="server")
            seconds = self.settings.start_timeout_seconds
            session = Session(self.connector(), self.secrets, start_timeout_seconds=seconds, check=self._check)
            self.open_sessions.add(session)
            try:
                await session.open()
            except BaseException:
                await self.end(session)
                raise
            return session

    async def end(self, session: Session) -> None:
        if session.start_seconds is not None:
            self._seconds.append((session.start_seconds, time.monotonic() - session.began))
        await session.close()
        self.open_sessions.discard(session)

    def start_seconds(self) -> float | None:
        """What a start takes where it is most of a session's time; else None. Medians of the last that ended."""
        if not self._seconds:
            return None
        start, whole = map(median, zip(*list(self._seconds), strict=True))
        return start if start > whole / 2 else None

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(self.end(session) for session in list(self.open_sessions)))

    def _keep(self, session: Session) -> None:
        """Make a session available to the next episode."""
        raise NotImplementedError

    def _check(self, found: Listing) -> None:
        difference = self.expected.difference(found, self.names) if self.expected else ""
        if difference:
            message = f"it has changed since the environment was made: {difference}"
            raise EnvironmentFault(message, tool="server")


class LeasedSessions(Sessions):
    """Each session serves one episode at a time; if `reuse`, then the next one."""

    def __init__(self, connector: Callable[[], Connector], secrets: Secrets, settings: MCPSettings):
        super().__init__(connector, secrets, settings)
        self.reuse = settings.reset in ("tool", "scratch")
        self.idle: list[Session] = []
        self._places = asyncio.Semaphore(settings.max_servers)

    async def take(self, prepare: Prepare) -> Session:
        await self._places.acquire()
        try:
            return await self._ready(prepare)
        except BaseException:
            self._places.release()
            raise

    async def give_back(self, session: Session) -> None:
        try:
            if self.reuse and session.is_alive and session.is_clean and not self._is_closed:
                self._keep(session)
            else:
                await self.end(session)
        finally:
            self._places.release()

    def _keep(self, session: Session) -> None:
        self.idle.append(session)

    async def _ready(self, prepare: Prepare) -> Session:
        while self.idle:
            session = self.idle.pop()
            with suppress(EnvironmentFault):  # lost while idle
                await session.check_tools()
                await prepare(session)
                return session
            await self.end(session)
        session = await self.open()
        try:
            await prepare(session)
        except BaseException:
            await self.end(session)
            raise
        return session


class SharedSessions(Sessions):
    """Episodes share the sessions: each takes the one with the fewest, the first of several, so that episodes one after
    another meet in the first, where a check finds what one left. One that is lost, or hangs, is replaced: no episode
    owned its state.
    """

    may_replace = True

    def __init__(self, connector: Callable[[], Connector], secrets: Secrets, settings: MCPSettings):
        super().__init__(connector, secrets, settings)
        self.places: list[Session | None] = [None] * settings.max_servers
        self._locks = [asyncio.Lock() for _ in self.places]
        self._num_episodes = [0] * settings.max_servers
        self._place_of: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self, prepare: Prepare) -> Session:
        place = self._num_episodes.index(min(self._num_episodes))
        self._num_episodes[place] += 1
        try:
            async with self._locks[place]:
                return await self._alive_in(place)
        except BaseException:
            self._num_episodes[place] -= 1
            raise

    async def give_back(self, session: Session) -> None:
        """It stays in its place, or was replaced there."""
        self._num_episodes[self._place_of[session]] -= 1

    async def _alive_in(self, place: int) -> Session:
        session = self.places[place]
        if session is not None:
            try:
                await session.check_tools()
                return session
            except EnvironmentFault as fault:
                hangs = session.has_timed_out and fault.type == "timeout"
                if session.is_alive and not hangs:  # others may be using it
                    raise
            await self._retire(session)
        self.places[place] = None
        session = await self.open()
        self._put(session, place)
        return session

    async def _retire(self, session: Session) -> None:
        """End it; one that others still wait for ends after its last answer, beside the one that takes its place."""
        if not session.is_awaited:
            await self.end(session)
            return
        ending = asyncio.create_task(self._end_once_over(session))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end_once_over(self, session: Session) -> None:
        await session.wait_until_over()
        await self.end(session)

    def _keep(self, session: Session) -> None:
        self._put(session, 0)

    def _put(self, session: Session, place: int) -> None:
        self.places[place], self._place_of[session] = session, place
