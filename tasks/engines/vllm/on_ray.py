"""vLLM servers on the nodes of Ray's cluster, where the launcher placed a host for each (`launch.launcher: ray`).

A host is an actor with a server as its child process, on a Unix socket of its node as ever: whoever reaches the routes
for new weights can swap the policy, and vLLM's API key does not guard them. Rank 0 asks the host and the host its
server, so nothing listens on a network but Ray, behind Ray's token. What passes are token ids, log-probs and names of
files; weights go by a folder that the nodes share.

A host that dies comes back by Ray, in its place of the placement, and counts as a server that died.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

import httpx2

from tasks.core.lease import Lease
from tasks.engines.vllm.client import RAY, connect
from tasks.engines.vllm.ray_transport import host_of, told
from tasks.engines.vllm.server_process import ServerDown, ServerProcess
from tasks.engines.vllm.settings import VLLMSettings

LOOK_AGAIN_SECONDS = 0.5
ANSWER_SECONDS, STOP_SECONDS = 5.0, 30.0  # in which a host says what it knows, and ends its server
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]  # status, headers and body


class ServerHost:
    """The actor: at most one server, of which it knows no more than `ServerProcess` does."""

    def __init__(self, folder: str, lease_seconds: float):
        os.chdir(folder)
        self.server: ServerProcess | None = None
        self.http: Any = None
        self.lease = Lease(lease_seconds)

    async def renew(self) -> None:
        """The launcher is there."""
        self.lease.renew()

    async def start(self, folder: Path, settings: VLLMSettings, **options: Any) -> str:
        """The name of its node. ValueError where the node does not see `folder`."""
        await self.stop()
        if not folder.exists():
            raise ValueError(
                f"{socket.gethostname()} does not see {folder}, so no vLLM server there can load it. Set "
                f"engine.settings.folder to one on storage that all nodes share."
            )
        self.server = await asyncio.to_thread(ServerProcess, folder, settings, number=1, **options)
        self.http = connect(self.server.url)
        return socket.gethostname()

    async def is_ready(self) -> str | None:
        """None where it answers, "" where it does not yet; else how it ended, with its last words."""
        if self.server is None:
            return "its host was started again"
        if not self.server.is_alive():
            return f"it {self.server.how_it_ended()}; {self.server.last_words()}"
        return None if await self.server.is_healthy() else ""

    async def ask(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Of the server. An error of the connection is httpx2's."""
        if self.http is None:
            raise httpx2.ConnectError("the host has no server")
        answer = await self.http.request(method, path, headers=headers, content=body)
        return answer.status_code, [(b"content-type", answer.headers.get("content-type", "").encode())], answer.content

    async def stop(self) -> None:
        server, http, self.server, self.http = self.server, self.http, None, None
        if http is not None:
            await http.aclose()
        if server is not None:
            await asyncio.to_thread(server.stop)


class HostedServer:
    """A server on its host, as `Servers` uses a `ServerProcess`."""

    def __init__(self, folder: Path, settings: VLLMSettings, *, number: int, log_folder: Path, **options: Any):
        self.settings, self.url, self.host = settings, f"{RAY}server-{number}", host_of(f"server-{number}")
        self.log_folder = (log_folder / f"node-of-{number}").absolute()
        self.wanted = (folder.absolute(), settings), {**options, "log_folder": self.log_folder}

    async def wait_ready(self) -> float:
        """The seconds until it answered. ServerDown where it ends first or takes too long."""
        begin, is_started, seen = time.monotonic(), False, "no answer yet"
        places, options = self.wanted
        while time.monotonic() - begin < self.settings.start_timeout_seconds:
            try:
                if not is_started:
                    await self.host.start.remote(*places, **options)
                    is_started = True
                ended = await self.host.is_ready.remote()
            except Exception as error:
                _raise_unless_on_its_way_back(error)
                is_started, seen = False, told(error)
            else:
                if ended is None:
                    return time.monotonic() - begin
                if ended:
                    raise ServerDown(ended)
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        raise ServerDown(
            f"it was not up within engine.settings.start_timeout_seconds "
            f"({self.settings.start_timeout_seconds:g} s): {seen}"
        )

    async def ending(self) -> str:
        """As the host tells it, or that the host does not; "" while it runs."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self.host.is_ready.remote() or ""
        except TimeoutError:
            return f"its host did not answer within {ANSWER_SECONDS:g} s; see {self.log_folder} on its node"
        except Exception as error:
            _raise_unless_of_ray(error)
            return told(error)

    def stop(self) -> None:
        import ray

        try:
            ray.get(self.host.stop.remote(), timeout=STOP_SECONDS)
        except Exception as error:
            _raise_unless_of_ray(error)


def _raise_unless_on_its_way_back(error: Exception) -> None:
    """The host's ValueError, as it is; ServerDown where the host died or its server cannot be started."""
    from ray.exceptions import ActorUnavailableError, RayTaskError

    _raise_unless_of_ray(error)
    if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
        raise error.cause from None
    if not isinstance(error, ActorUnavailableError):
        raise ServerDown(told(error)) from None


def _raise_unless_of_ray(error: Exception) -> None:
    from ray.exceptions import RayError

    if not isinstance(error, RayError):
        raise error
