"""An MCP server over HTTP that misbehaves on request: `act` with {"how": …} answers as no SDK would let it."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCHEMA = {"type": "object", "properties": {"how": {"type": "string"}}}
TOOL = {"name": "act", "description": "Acts.", "inputSchema": SCHEMA, "annotations": {"readOnlyHint": True}}

HELD, RELEASED = threading.Event(), threading.Event()  # a call waits: "held " before how it is answered then


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer takes 40 ms

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, request = message["method"], message.get("id")
        if method == "initialize":
            info = {"name": "raw", "version": "1"}
            version = message["params"]["protocolVersion"]
            self.answer(request, {"protocolVersion": version, "capabilities": {}, "serverInfo": info})
        elif method == "tools/list":
            self.answer(request, {"tools": [TOOL]})
        elif method == "tools/call":
            self.act(request, message["params"]["arguments"]["how"])
        else:
            self.reply(202, b"")

    def act(self, request: int, how: str) -> None:
        if how.startswith("held "):
            HELD.set()
            RELEASED.wait()
            how = how.removeprefix("held ")
        if how == "endless":
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("connection", "close")
            self.end_headers()
            with suppress(OSError):  # until the client has had enough
                while True:
                    self.wfile.write(b" " * 65536)
        elif how == "packed":
            self.reply(200, gzip.compress(b"{}"), **{"content-encoding": "gzip"})
        elif how == "breaks off":
            self.close_connection = True
            self.connection.close()
        elif how.isdigit():
            self.reply(int(how), b"")
        elif how.startswith("error "):
            status, code = map(int, how.split()[1:])
            error = {"code": code, "message": "no such customer"}
            self.reply(status, json.dumps({"jsonrpc": "2.0", "id": request, "error": error}).encode())
        else:
            self.answer(request, {"content": [{"type": "text", "text": how}]})

    def answer(self, request: int, result: Any) -> None:
        self.reply(200, json.dumps({"jsonrpc": "2.0", "id": request, "result": result}).encode())

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[str]:
    """The server's URL, for as long as it is needed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
    server.shutdown()
    server.server_close()
