"""The OpenEnv servers of one environment: one at a URL, or processes of ours, each in its own environment.

A process has a port that we choose, its own process group, ended whole, and as much of its output is kept as tells why
it ended. At most `max_servers` run, each with at most `max_sessions` episodes; a later episode waits. A process that
ends by itself, or did not answer an episode in time, is replaced, `max_restarts` times in all.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tasks.core import json_text
from tasks.core.heard_process import HeardProcess
from tasks.core.secrets import Secrets
from tasks.core.text import counted, one_line
from tasks.environments.openenv.messages import MAX_MESSAGE_BYTES
from tasks.environments.openenv.sessions import Session
from tasks.environments.openenv.settings import PORT, OpenEnvSettings
from tasks.tools.base import EnvironmentFault
from tasks.tools.server_settings import inherited_variables

if TYPE_CHECKING:
    from tasks.core.bounded_http import BoundedClient

MAX_LAST_LINES = 3
LOOK_SECONDS = 0.05
END_SECONDS = 0.5  # between the end of a connection and that of the process
Check = Callable[["Server"], Awaitable[None]]  # EnvironmentFault if a server is not the one there was before


class Server:
    """`seconds`: for each answer over HTTP; `num_sessions`: episodes on it now; `is_spent`: it takes no more."""

    def __init__(
        self, url: str, headers: Mapping[str, str], secrets: Secrets, process: HeardProcess | None, *, seconds: float
    ):
        self.url, self.headers, self.secrets, self.process = url, dict(headers), secrets, process
        self.seconds = seconds
        self.num_sessions, self.is_spent = 0, False
        self._client: BoundedClient | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is None or self.process.is_alive()

    def session(self) -> Session:
        is_ours = self.process is not None
        return Session(self.url, self.headers, self.secrets, is_ours=is_ours, reason=self.reason)

    async def ask(self, path: str, *, body: Any = None) -> Any:
        """The JSON of a GET, or of a POST with a body. EnvironmentFault if there is none."""
        import httpx2

        client, address = self._http(), f"{self.url.rstrip('/')}/{path}"
        try:
            reply = await (client.get(address) if body is None else client.post(address, json=body))
            if reply.status_code != 200:
                raise EnvironmentFault(f"the server answered /{path} with HTTP {reply.status_code}", tool="server")
            return self.secrets.hide_in(json_text.parse(reply.content))
        except httpx2.HTTPError as error:
            told = one_line(self.secrets.hide(f"{type(error).__name__}: {error}"))
            raise EnvironmentFault(f"the server could not be asked for /{path}: {told}", tool="server") from None
        except ValueError:
            raise EnvironmentFault(f"the server answered /{path} with no JSON", tool="server") from None

    async def wait_until_healthy(self) -> None:
        """EnvironmentFault if it ends, or does not say so in time."""
        deadline = asyncio.get_running_loop().time() + self.seconds
        while True:
            try:
                health = await self.ask("health")
                break
            except EnvironmentFault:
                if not self.is_alive:
                    raise EnvironmentFault(f"the server {await self.reason()}", tool="server") from None
                if self.process is None or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(LOOK_SECONDS)
        if not isinstance(health, dict) or health.get("status") != "healthy":
            raise EnvironmentFault(
                f"the server answered /health with {one_line(health, 80)}, not as OpenEnv does", tool="server"
            )

    async def reason(self) -> str:
        """How its process ended, and what it said last; empty while it runs, or where it is not ours."""
        if self.process is None:
            return ""
        for _ in range(int(END_SECONDS / LOOK_SECONDS)):
            if not self.process.is_alive():
                said = await asyncio.to_thread(self.process.last_words, MAX_LAST_LINES, wait_seconds=END_SECONDS)
                told = f"; it last said: {' | '.join(said)}" if said else ""
                return self.secrets.hide(f"{self.process.how_it_ended()}{told}")
            await asyncio.sleep(LOOK_SECONDS)
        return ""

    async def end(self) -> None:
        self.is_spent = True
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)
        if self._client is not None:
            await self._client.aclose()

    def _http(self) -> BoundedClient:
        from tasks.core.bounded_http import BoundedClient

        if self._client is None:
            limits: dict[str, Any] = {"total_seconds": self.seconds, "timeout": self.seconds}
            is_ours = self.process is not None
            self._client = BoundedClient(
                max_bytes=MAX_MESSAGE_BYTES, headers=self.headers, trust_env=not is_ours, **limits
            )
        return self._client


class Servers:
    """Which episode gets which server. All of it happens on the event loop."""

    def __init__(self, settings: OpenEnvSettings):
        self.settings = settings
        self.variables, self.headers, self.secrets = settings.read_secrets()
        self.servers: list[Server] = []
        self.leaving: list[Server] = []  # replaced, and an episode is still on them
        self.num_restarts = 0
        self.check: Check | None = None
        self._places = asyncio.Semaphore(settings.max_servers * settings.max_sessions)
        self._choosing = asyncio.Lock()
        self._is_closed = False

    async def take(self) -> Server:
        """A server with a place for one more episode; EnvironmentFault if none can be had."""
        await self._places.acquire()
        try:
            async with self._choosing:
                server = self._with_a_place() or await self._start()
        except BaseException:
            self._places.release()
            raise
        server.num_sessions += 1
        return server

    async def give_back(self, server: Server, *, is_spent: bool = False) -> None:
        """The episode is over. A spent process takes no more episodes and ends with its last one."""
        server.num_sessions -= 1
        server.is_spent = server.is_spent or (is_spent and server.process is not None)
        try:
            if server.is_spent and not server.num_sessions:
                await server.end()
        finally:
            self._places.release()

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(server.end() for server in [*self.servers, *self.leaving]))

    def _with_a_place(self) -> Server | None:
        """The one with the fewest episodes; the first where several are equal."""
        free = [server for server in self.servers if self._is_usable(server)]
        free = [server for server in free if server.num_sessions < self.settings.max_sessions]
        return min(free, key=lambda server: server.num_sessions, default=None)

    def _is_usable(self, server: Server) -> bool:
        return server.is_alive and not server.is_spent

    async def _start(self) -> Server:
        if self._is_closed:
            raise EnvironmentFault("the environment was closed", tool="server")
        await self._make_room()
        process, url = None, self.settings.url or ""
        if self.settings.command is not None:
            port = _free_port()
            url, command = f"http://127.0.0.1:{port}", [part.replace(PORT, port) for part in self.settings.command]
            env = inherited_variables() | self.variables | self.settings.literals()
            process = await asyncio.to_thread(_start_process, command, env)
        seconds = self.settings.start_timeout_seconds
        server = Server(url, self.headers, self.secrets, process, seconds=seconds)
        self.servers.append(server)
        try:
            await server.wait_until_healthy()
            if self.check is not None:
                await self.check(server)
        except BaseException:
            await server.end()
            raise
        return server

    async def _make_room(self) -> None:
        """Take one that ended, or is spent, out of the list; EnvironmentFault if that was one too many."""
        gone = next((server for server in self.servers if not self._is_usable(server)), None)
        if gone is None:
            return
        if self.num_restarts == self.settings.max_restarts:
            told = "" if gone.is_alive else f"; the last one {await gone.reason()}"
            raise EnvironmentFault(
                f"the server was replaced {counted(self.num_restarts, 'time')} (max_restarts), and no more{told}",
                tool="server",
            )
        self.num_restarts += 1
        self.servers.remove(gone)
        if gone.num_sessions:
            self.leaving.append(gone)
        else:
            await gone.end()


def _start_process(command: list[str], env: Mapping[str, str]) -> HeardProcess:
    try:
        return HeardProcess(command, env=env)
    except OSError as error:
        told = f"the server could not be started: {error.strerror}: {command[0]!r}"
        raise EnvironmentFault(told, tool="server") from None


def _free_port() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return str(listener.getsockname()[1])
