"""A small chat endpoint in a thread: it answers from scripts, or misbehaves as told, and keeps what it read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tasks.core.tool_calls import CLOSE, OPEN, between_tags
from tasks.engines.endpoint.settings import FrontierSettings

KEY, VARIABLE = "sk-4711-frontier-secret", "FRONTIER_KEY"
MOST_CHARACTERS = 400  # of one reply: the rest is cut off
CONTEXT_CHARACTERS = 4000  # of a whole conversation
PATIENCE = 120.0  # seconds: a machine may be busy
Answer = tuple[int, bytes | dict[str, Any]]


class ChatEndpoint:
    """`scripts` maps a first request to the texts that are written to it, turn by turn. With `structured`, what stands
    between tags in a text is handed over as tool calls; without, the text goes out as it is. `misbehave` may answer in
    the place of the script: it gets the number of the request, from 0, and returns None to let the script speak.
    """

    def __init__(self, scripts: Mapping[str, Sequence[str]], *, structured: bool = True):
        self.scripts, self.structured = scripts, structured
        self.misbehave: Callable[[int], Answer | None] = lambda number: None
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.most_at_once = self._at_once = 0
        self.retry_after = {"retry-after-ms": "1"}  # the client's own retries need not wait
        self.answers_from = 0  # requests at once: as long as there never were so many, none is answered
        self._lock = threading.Condition()

    def answer(self, request: dict[str, Any]) -> Answer:
        with self._lock:
            number = len(self.asked)
            self.asked.append(request)
        return self.misbehave(number) or self._from_script(request["messages"])

    def _from_script(self, messages: list[dict[str, Any]]) -> Answer:
        if len(json.dumps(messages)) > CONTEXT_CHARACTERS:
            return 400, {"error": {"message": "too much", "code": "context_length_exceeded"}}
        turn = sum(message["role"] == "assistant" for message in messages)
        text = self.scripts[messages[0]["content"]][turn]
        return 200, completion(text[:MOST_CHARACTERS], structured=self.structured, was_cut=len(text) > MOST_CHARACTERS)

    @contextmanager
    def serving(self) -> Iterator[str]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.keys.add(self.headers["authorization"])
                with endpoint._lock:
                    endpoint._at_once += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint._at_once)
                    endpoint._lock.notify_all()
                    endpoint._lock.wait_for(lambda: endpoint.most_at_once >= endpoint.answers_from, PATIENCE)
                status, body = endpoint.answer(request)
                with endpoint._lock:
                    endpoint._at_once -= 1
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                with suppress(OSError):  # a client that waited long enough is gone
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(content)))
                    for header, value in endpoint.retry_after.items():
                        self.send_header(header, value)
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            with self._lock:
                self.answers_from = 0
                self._lock.notify_all()
            server.shutdown()
            server.server_close()


def completion(text: str, *, structured: bool = True, was_cut: bool = False) -> dict[str, Any]:
    """A chat completion of 100 tokens read and 10 written."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if structured and OPEN in text and CLOSE in text:
        calls = [{"type": "function", "function": _function(body)} for body in between_tags(text, OPEN, CLOSE)[0]]
        named = [{**call, "id": f"c{number}"} for number, call in enumerate(calls)]
        message = {"role": "assistant", "content": text[: text.index(OPEN)] or None, "tool_calls": named}
    choice = {"index": 0, "finish_reason": "length" if was_cut else "stop", "message": message}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


def _function(body: str) -> dict[str, Any]:
    """What a server makes of the text of a call; arguments that are no JSON go out as they are."""
    try:
        value = json.loads(body)
        return {"name": value["name"], "arguments": json.dumps(value["arguments"])}
    except (ValueError, KeyError):
        return {"name": "note", "arguments": body}


def settings(url: str, **changed: Any) -> FrontierSettings:
    """An endpoint that is asked for at most two answers a turn, at 2 a million tokens read and 10 written."""
    whole = {
        "url": url, "model": "lab/m", "api_key_variable": VARIABLE, "temperature": 0.0, "max_output_tokens": 90,
        "max_concurrent_episodes": 8, "max_retries": 1, "timeout_seconds": PATIENCE, "samples_per_problem": 1,
        "price_per_million_input_tokens": 2.0, "price_per_million_output_tokens": 10.0, "num_problems": None,
    }  # fmt: skip
    return FrontierSettings.model_validate(whole | changed)
