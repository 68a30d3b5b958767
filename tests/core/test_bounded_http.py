"""Endpoints that would use up memory, time or trust, whoever asks them: judge, frontier model and vLLM server.

MCP over HTTP goes through the same client; what it says of such a server is in test_mcp_trouble.py.
"""

from __future__ import annotations

import gzip
import resource
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks.core.background import run
from tasks.core.bounded_http import BoundedClient, RefusedAnswer
from tasks.engines.endpoint.client import Endpoint
from tasks.engines.vllm.client import MAX_ANSWER_BYTES, VLLMClient
from tasks.tools.judge.client import JudgeClient
from tasks.tools.judge.settings import JudgeSettings
from tests import tiny
from tests.engines.endpoint import chat_endpoint
from tests.tools.judge.endpoint import judge_row

pytestmark = pytest.mark.slow
BOMB = gzip.compress(bytes(1 << 28))  # 256 MB in 260 kB
ELSEWHERE = "/internal"


@contextmanager
def hostile(how: str) -> Iterator[tuple[str, list[str]]]:
    """The URL of a server that answers every request in its own way, and the paths it was asked for."""
    asked: list[str] = []
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(self.path)
            with suppress(OSError):  # until the client has had enough
                getattr(self, how)()

        def packed(self) -> None:
            self.begin(200, **{"content-encoding": "gzip", "content-length": str(len(BOMB))})
            self.wfile.write(BOMB)

        def endless(self) -> None:
            self.begin(200)
            while not is_over.is_set():
                self.wfile.write(b" " * 65536)

        def events(self) -> None:
            self.begin(200, **{"content-type": "text/event-stream"})
            while not is_over.is_set():
                self.wfile.write(b"data: {}\n\n" * 6000)

        def trickling(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
            while not is_over.wait(0.05):
                self.wfile.write(b" ")

        def trickling_headers(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nx-a: ")
            while not is_over.wait(0.05):
                self.wfile.write(b"a")

        def redirecting(self) -> None:
            self.begin(307, location=ELSEWHERE, **{"content-length": "0"})

        def begin(self, status: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in ({"content-type": "application/json", "connection": "close"} | headers).items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()


async def ask_judge(url: str, seconds: float) -> None:
    row = judge_row(f"{url}/v1", Path("unused"), timeout_seconds=seconds)
    client = JudgeClient(JudgeSettings.model_validate(row))
    try:
        await client.answer([{"role": "user", "content": "hello"}], seed=1)
    finally:
        await client.close()


async def ask_frontier(url: str, seconds: float) -> None:
    given = {"api_key_variable": None, "max_retries": 0, "timeout_seconds": seconds}
    endpoint = Endpoint(chat_endpoint.settings(f"{url}/v1", **given))
    try:
        await endpoint._ask([{"role": "user", "content": "hello"}], [])
    finally:
        await endpoint.client.close()


async def ask_vllm(url: str, seconds: float) -> None:
    client = VLLMClient(
        url, model="m", sampling=tiny.SAMPLING, end_ids=(3,), vocabulary_size=9, timeout_seconds=seconds
    )
    try:
        await client.generate([1, 2], max_new_tokens=2, seed=1, cache_salt=None)
    finally:
        await client.close()


@pytest.mark.parametrize("ask", [ask_judge, ask_frontier, ask_vllm])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("packed", "sent a packed answer, though asked for none"),
        ("endless", "sent a message of more than"),
        ("events", "sent a message of more than"),
        ("trickling", "no (whole )?answer|timed out"),
        ("trickling_headers", "no (whole )?answer|timed out"),
        ("redirecting", "307"),
    ],
)
def test_a_hostile_endpoint_is_a_fault_of_ours_that_says_why(
    ask: Callable[[str, float], Coroutine[Any, Any, None]], how: str, words: str
) -> None:
    """Within the time it is given, within 200 MB, and with no request to anywhere else."""
    patience = 1.0 if how.startswith("trickling") else 120.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hostile(how) as (url, asked), pytest.raises(Exception, match=f"(?i){words}") as caught:
        run(ask(url, patience)).result(120)
    assert type(caught.value).__name__ in ("EnvironmentFault", "EndpointFault", "ServerDown")
    assert "\n" not in str(caught.value)
    assert asked and ELSEWHERE not in asked
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * MAX_ANSWER_BYTES / 1024


def test_no_packing_is_asked_for_whatever_the_caller_says() -> None:
    read: list[str] = []

    async def ask(url: str) -> None:
        async with BoundedClient(total_seconds=60) as client:
            request = client.build_request("POST", url, content=b"{}", headers={"Accept-Encoding": "gzip"})
            with pytest.raises(RefusedAnswer):
                await client.send(request)
            read.append(request.headers["accept-encoding"])

    with hostile("packed") as (url, _):
        run(ask(url)).result(120)
    assert read == ["identity"]
