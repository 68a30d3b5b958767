"""The gateway's server: starlette and uvicorn in a thread of its own, so that a training loop can run beside it.

    with Gateway(backend, tools=host) as gateway:
        run_agent(OPENAI_BASE_URL=gateway.openai_url, ANTHROPIC_BASE_URL=gateway.url, TURNWISE_MCP_URL=gateway.mcp_url)

It listens on the loopback, by default on a free port. It never renders and never samples: `completions.Backend`
does. Import this inside functions: starlette and uvicorn are missing on a bare GPU machine.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tasks.gateway.completions import Backend, ProtocolError, ToolHost
from tasks.gateway.doors import PROTOCOLS, LocalDoor, protocol_of
from tasks.gateway.http_io import Refusals, key_of, read_body
from tasks.gateway.turn_endpoint import TurnEndpoint, check_model
from tasks.gateway.waiting import told
from tasks.gateway.wire import WireProtocol

LOOPBACK = "127.0.0.1"
KEEP_ALIVE_SECONDS = 10.0  # between two comments of a stream whose turn is not written yet
IDLE_SECONDS = 300  # after which a connection without requests is closed: an agent may think between two turns
START_SECONDS, CLOSE_SECONDS = 30.0, 5
BACKLOG = 2048

Health = Callable[[], Mapping[str, Any]]
Hook = Callable[[Mapping[str, str], bytes], tuple[int, Mapping[str, Any]]]  # headers and body → status and reply


class Gateway:
    """`port` 0 is a free one. `health` is what GET /health says; `hooks` are further POST paths, each of which is
    called in a thread. `is_keyless`: the Backend asks for no key, so web pages are kept out. ValueError if the address
    is taken.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        tools: ToolHost | None = None,
        port: int = 0,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        health: Health | None = None,
        hooks: Mapping[str, Hook] | None = None,
        is_keyless: bool = False,
    ):
        self.backend, self.tools = backend, tools
        self.keep_alive_seconds, self.health, self.hooks = keep_alive_seconds, health, hooks or {}
        self.port, self.is_keyless = port, is_keyless
        self.refusals = Refusals()
        self._closing = asyncio.Event()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """For ANTHROPIC_BASE_URL, whose clients add /v1."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def mcp_url(self) -> str:
        return f"{self.url}/mcp"

    @property
    def is_alive(self) -> bool:
        """Whether it answers, and will go on to."""
        is_running = self._thread is not None and self._thread.is_alive()
        return is_running and self._server is not None and not self._server.should_exit

    def wait(self) -> None:
        """Until its server has ended, whoever ended it."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Gateway:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Returns when requests are answered."""
        listening = self._listen()
        config = uvicorn.Config(
            LocalDoor(self._app(), self.refusals) if self.is_keyless else self._app(),
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=2 * CLOSE_SECONDS,  # `_hang_up` comes first
            backlog=BACKLOG,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=(self._server, listening), name="gateway", daemon=True)
        self._thread.start()
        until = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise RuntimeError("the gateway's server did not start; its log says why")
            time.sleep(0.002)

    def close(self) -> None:
        """Answer those who wait with status 503, and end within CLOSE_SECONDS, though a client neither sends nor reads
        the rest. May be called twice.
        """
        if self._server is None or self._thread is None or self._loop is None:
            return
        self._server.should_exit = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._begin_to_close)
        self._thread.join(timeout=3 * CLOSE_SECONDS)

    def _begin_to_close(self) -> None:
        self._closing.set()
        asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._hang_up)

    def _hang_up(self) -> None:
        """On whoever is left. uvicorn would cancel their requests, and log each as a fault of ours."""
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def _listen(self) -> socket.socket:
        # asyncio sets TCP_NODELAY where the protocol is named; else each reply waits 40 ms for a delayed ACK.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK, self.port))
        except OSError as error:
            listening.close()
            raise ValueError(
                f"the gateway cannot listen on {LOOPBACK}:{self.port} ({error.strerror or error}), so no agent could "
                f"reach it. Choose another port; 0 takes a free one."
            ) from None
        listening.listen(BACKLOG)
        self.port = listening.getsockname()[1]
        return listening

    def _run(self, server: uvicorn.Server, listening: socket.socket) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await server.serve(sockets=[listening])

        with listening, asyncio.Runner() as runner:
            try:
                runner.run(serve())
            finally:  # before anybody is told: the next gateway is asked for at once
                server.should_exit = True

    def _app(self) -> Starlette:
        routes: list[BaseRoute] = [
            *(Route(path, self._turns(protocol)) for path, protocol in PROTOCOLS.items()),
            Route("/v1/models", self._list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._tell_model, methods=["GET"]),
            Route("/health", self._tell_health, methods=["GET"]),
            *(Route(path, self._answer(hook), methods=["POST"]) for path, hook in self.hooks.items()),
        ]
        if self.tools is None:
            return Starlette(routes=routes, exception_handlers={HTTPException: self._no_such_page})
        from tasks.gateway.tool_endpoint import ToolEndpoint

        endpoint = ToolEndpoint(self.tools, self._closing, self.refusals)
        return Starlette(
            routes=[*routes, Route("/mcp", endpoint)],
            exception_handlers={HTTPException: self._no_such_page},
            lifespan=lambda _: endpoint.run(),
        )

    def _turns(self, protocol: WireProtocol) -> TurnEndpoint:
        return TurnEndpoint(protocol, self.backend, self._closing, self.refusals, self.keep_alive_seconds)

    async def _list_models(self, request: Request) -> Response:
        try:
            names = told(lambda: self.backend.models(key_of(request)))
        except ProtocolError as error:
            return self.refusals.reply(protocol_of(request), error)
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
        return JSONResponse({"object": "list", "data": [*map(_model, names)], "has_more": False, **ends})

    async def _tell_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            check_model(name, told(lambda: self.backend.models(key_of(request))))
        except ProtocolError as error:
            return self.refusals.reply(protocol_of(request), error)
        return JSONResponse(_model(name))

    async def _tell_health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"} if self.health is None else dict(self.health()))

    def _answer(self, hook: Hook) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                body = await read_body(request)
                status, reply = await asyncio.to_thread(told, lambda: hook(dict(request.headers), body))
            except ProtocolError as error:
                return self.refusals.reply(protocol_of(request), error)
            except ClientDisconnect:
                return Response(status_code=400)
            return JSONResponse(dict(reply), status)

        return answer

    async def _no_such_page(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path} is not served here; {', '.join(PROTOCOLS)} and /v1/models are."
        no_page = ProtocolError(error.status_code, message, code="not_found")
        return self.refusals.reply(protocol_of(request), no_page)


def _model(name: str) -> dict[str, Any]:
    """As the lists of OpenAI and of Anthropic have it."""
    of_openai = {"id": name, "object": "model", "created": 0, "owned_by": "turnwise"}
    return {**of_openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
