"""MCP servers that misbehave, spoken by hand over stdio: the SDK would not let them. They start in 30 ms.

`python raw_server.py HOW [FILE]`: what it does wrong. It has one tool, `act`, and does it when that is called, unless
the way is one of starting, of listing or of ending.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HOW = sys.argv[1]
FILE = Path(os.environ.get("KEPT_FILE") or next(iter(sys.argv[2:]), ""))


num_calls = 0


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tools() -> list[dict[str, Any]]:
    argument = "thing" if HOW == "changes" and FILE.exists() else "what"
    schema = {"type": "object", "properties": {argument: {"type": "string"}}}
    tool = {"name": "act", "description": "Acts.", "inputSchema": HOSTILE.get(HOW, schema)}
    if HOW in PROMISES:
        tool["outputSchema"] = PROMISES[HOW]
    if HOW == "hangs":
        return [tool, {**tool, "name": "reset", "inputSchema": {"type": "object"}}]
    return [tool] * (2 if HOW == "twins" else 1)


def page(number: str) -> dict[str, Any]:
    """One tool, and where the next one is, up to the page that `HOW` names."""
    last = HOW.split()[1]
    following = {} if number == last else {"nextCursor": str(int(number) + 1)}
    return {"tools": [{**tools()[0], "name": f"act-{number}"}], **following}


def doubling(levels: int) -> dict[str, Any]:
    """Each definition refers twice to the next."""
    twice = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    part = {"$ref": "#/$defs/d0"}
    return {"type": "object", "properties": {"what": part}, "$defs": {**twice, f"d{levels}": {"type": "string"}}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"what": schema}}
    return schema


HOSTILE = {"doubling": doubling(40), "nested": nested(40)}
PROMISES = {
    "promises a pattern": {"type": "object", "properties": {"what": {"type": "string", "pattern": "^(a+)+$"}}},
    "promises to double": doubling(40),
}


def act(request: int, arguments: dict[str, Any]) -> None:
    global num_calls
    num_calls += 1
    if HOW == "keeps":  # as a server with a data base: what it was told last is in a file, and it says what was there
        before = FILE.read_text() if FILE.exists() else ""
        FILE.write_text(f"{before}x")
        said = f"{before} in {FILE}" if before else f"nothing in {FILE}"
        return send({"id": request, "result": {"content": [{"type": "text", "text": said}]}})
    while HOW == "hangs" and arguments.get("what") == "hang" and not FILE.exists():
        time.sleep(0.01)
    if HOW == "counts":
        return send({"id": request, "result": {"content": [{"type": "text", "text": f"{num_calls}"}]}})
    if HOW == "garbage":
        while True:
            os.write(1, b"no message at all\n" * 4000)
    if HOW == "long line":
        while True:
            os.write(1, b"x" * 65536)
    if HOW == "stderr":
        for _ in range(2000):  # 125 MB
            os.write(2, b"y" * 65535 + b"\n")
    if HOW == "notifies":
        while True:
            send({"method": "notifications/message", "params": {"level": "info", "data": "z" * 100_000}})
    if HOW == "exit":
        print("first line\nlast line: disk full", file=sys.stderr, flush=True)
        sys.exit(7)
    if HOW == "closes stdout":
        os.close(1)
        time.sleep(60)
    if HOW == "nonsense":
        return send({"id": request, "result": {"content": "not a list"}})
    if HOW.startswith("error "):
        return send({"id": request, "error": {"code": int(HOW.split()[1]), "message": f"no to call {num_calls}"}})
    if HOW == "chatty":
        print("a stray print")
    made = {"structuredContent": {"what": "a" * 40 + "!"}} if HOW in PROMISES else {}
    send({"id": request, "result": {"content": [{"type": "text", "text": "done"}], **made}})
    return None


def answer_without_a_handshake(method: str, request: int) -> None:
    """As a server that speaks the protocol of 2026 alone."""
    whole = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
    info = {"io.modelcontextprotocol/serverInfo": {"name": "raw", "version": "3"}}
    if method == "server/discover":
        send(
            {"id": request, "result": {**whole, "supportedVersions": ["2026-07-28"], "capabilities": {}, "_meta": info}}
        )
    elif method == "tools/list":
        send({"id": request, "result": {**whole, "tools": tools()}})
    elif method == "tools/call":
        send({"id": request, "result": {**whole, "content": [{"type": "text", "text": "done"}]}})
    elif request is not None:
        send({"id": request, "error": {"code": -32022, "message": "no", "data": {"supported": ["2026-07-28"]}}})


def main() -> None:
    if HOW == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if HOW == "dies at start":
        sys.exit("no database at /nowhere")
    if HOW == "dies as Node does":
        stack = "".join(f"    at Function.load (node:internal/{number})\n" for number in range(9))
        sys.exit(f"node:internal:1210\n  throw err;\n\nError: Cannot find module 'x'\n{stack}}}\n\nNode.js v20.20.2")
    for line in sys.stdin:
        message = json.loads(line)
        method, request = message.get("method"), message.get("id")
        if HOW == "silent":
            continue
        if HOW == "modern":
            answer_without_a_handshake(method, request)
        elif method == "initialize":
            info = {"name": "raw", "version": "2"}
            version = message["params"]["protocolVersion"]
            send({"id": request, "result": {"protocolVersion": version, "capabilities": {}, "serverInfo": info}})
        elif method == "tools/list" and HOW.startswith("pages "):
            send({"id": request, "result": page(message.get("params", {}).get("cursor", "1"))})
        elif method == "tools/list":
            send({"id": request, "result": {"tools": tools()}})
        elif method == "tools/call":
            act(request, message["params"]["arguments"])
    if HOW == "stubborn":
        time.sleep(60)


if __name__ == "__main__":
    main()
