"""An OpenAI-compatible server in a thread, for the real `openai` client: it answers what a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tasks.tools.judge.settings import OWN_RUBRIC, JudgeSettings

Messages = list[dict[str, str]]


def opinion(success: bool = True, score: float | None = None, soundness: float = 1.0, reason: str = "So it is.") -> str:
    row = {"reason": reason, "success": success, "score": float(success) if score is None else score}
    return json.dumps({**row, "soundness": soundness})


@dataclass
class Endpoint:
    """`says` answers (messages, request); `failures` come first, one per request: a status, also with its
    Retry-After, "cut", "slow", "drop". `body_of_failure` is sent with a status.
    """

    says: Callable[[Messages, dict[str, Any]], str | None] = lambda messages, request: opinion()
    failures: list[int | str | tuple[int, str]] = field(default_factory=list)
    body_of_failure: bytes = b'{"error": {"message": "no: sk-0815-very-secret"}}'
    retry_after: str = "0"
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    finish_reason: str = "stop"
    url: str = ""

    def body(self, request: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.says(request["messages"], request)}
        choice = {"index": 0, "finish_reason": self.finish_reason, "message": message}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"], "choices": [choice]}


@contextmanager
def serve(endpoint: Endpoint) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            endpoint.asked.append(request)
            endpoint.keys.append(self.headers["authorization"])
            failure = endpoint.failures.pop(0) if endpoint.failures else 200
            with suppress(OSError):  # a client that gave up
                self.fail(failure) if failure != 200 else self.reply(200, json.dumps(endpoint.body(request)).encode())

        def fail(self, failure: int | str | tuple[int, str]) -> None:
            if failure == "cut":
                self.reply(200, b'{"id": "1", "choices": [{"mess')
            elif failure == "drop":
                self.close_connection = True
            elif failure == "slow":
                time.sleep(3.0)
            else:
                assert not isinstance(failure, str)
                status, retry_after = (failure, endpoint.retry_after) if isinstance(failure, int) else failure
                self.reply(status, endpoint.body_of_failure, retry_after)

        def reply(self, status: int, body: bytes, retry_after: str = "") -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            if retry_after:
                self.send_header("retry-after", retry_after)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()


def judge_row(url: str, folder: Path, **changed: Any) -> dict[str, Any]:
    """The section `environment.judge`, one vote at temperature 0 and nobody's labels; `changed` replaces keys."""
    row = {
        "url": url, "model": "stand-in", "api_key_variable": None, "decides": True, "rubric": OWN_RUBRIC,
        "show_reference": False, "structured": True, "num_votes": 1, "temperature": 0.0, "seed": 7,
        "max_output_tokens": 300, "max_characters": 20_000, "max_attempts": 2, "max_retries": 1,
        "max_concurrent_requests": 8, "timeout_seconds": 20.0, "cache_folder": str(folder / "judge"),
        "agreement": None,
    }  # fmt: skip
    return {**row, **changed}


def judge_settings(endpoint: Endpoint, folder: Path, **changed: Any) -> JudgeSettings:
    return JudgeSettings.model_validate(judge_row(endpoint.url, folder, **changed))
