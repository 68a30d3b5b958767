"""A proxy before a real vLLM server that spoils some of its answers: what a server does wrong, with all else real."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

FAULTS = ("500", "truncated", "inconsistent", "dropped", "silent")


class FaultProxy:
    """Passes requests on to `target`, a URL or a socket, at a URL of its own. `hides` are routes it says it does not
    have; `overrides` go into every turn.
    """

    def __init__(self, target: str, *, hides: tuple[str, ...] = (), overrides: dict[str, Any] | None = None):
        socket = target.removeprefix("unix:") if target.startswith("unix:") else None
        self.client = httpx2.Client(
            base_url="http://localhost" if socket else target,
            transport=httpx2.HTTPTransport(uds=socket, limits=httpx2.Limits(max_keepalive_connections=0)),
            timeout=120,
        )
        self.hides, self.overrides = hides, overrides or {}
        self.fault, self.num_left, self.lock = "", 0, threading.Lock()
        self.is_closing = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.answer(self, None)

            def do_POST(self) -> None:
                proxy.answer(self, self.rfile.read(int(self.headers["Content-Length"])))

            def log_message(self, format: str, *args: Any) -> None:
                """Tests need no access log."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.client.close()

    def spoil(self, fault: str, *, times: int) -> None:
        """Spoil the next so many turns."""
        assert fault in FAULTS
        self.fault, self.num_left = fault, times

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes | None) -> None:
        if handler.path in self.hides:
            return _send(handler, 404, b'{"detail": "Not Found"}')
        with self.lock:
            is_spoilt = handler.path == "/v1/completions" and self.num_left > 0
            self.num_left -= is_spoilt
        if is_spoilt and self.fault == "dropped":
            handler.close_connection = True
            return None
        if is_spoilt and self.fault == "silent":
            self.is_closing.wait()
            return None
        if is_spoilt and self.fault == "500":
            return _send(handler, 500, b'{"error": {"message": "boom"}}')
        if body is not None and handler.path == "/v1/completions":
            body = json.dumps(json.loads(body) | self.overrides).encode()
        status, content = self._pass_on(handler, body)
        if is_spoilt and self.fault == "truncated":
            content = content[: len(content) // 2]
        if is_spoilt and self.fault == "inconsistent":
            row = json.loads(content)
            row["choices"][0]["logprobs"]["token_logprobs"].pop()
            content = json.dumps(row).encode()
        return _send(handler, status, content)

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: bytes | None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        answer = self.client.request(handler.command, handler.path, content=body, headers=headers)
        return answer.status_code, answer.content


def _send(handler: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
