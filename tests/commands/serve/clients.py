"""Clients of a served model: plain HTTP, a thread each, until they are told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

WAIT_SECONDS = 120.0


def ask(url: str, messages: Sequence[Any], *, model: str, key: str = "", **given: Any) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": model, "messages": list(messages), **given}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_SECONDS)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


class Load:
    """`count` clients that ask one after another. `versions[client]` are those that answered, `failed` all else."""

    def __init__(self, url: str, model: str, *, count: int):
        self.url, self.model = url, model
        self.versions: list[list[str]] = [[] for _ in range(count)]
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(count)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)

    def answered_by(self, version: str) -> int:
        return sum(row.count(version) for row in self.versions)

    @property
    def num_answered(self) -> int:
        return sum(map(len, self.versions))

    def _work(self, client: int) -> None:
        messages: list[dict[str, str]] = []
        with httpx2.Client(timeout=WAIT_SECONDS) as http:
            while not self._stop.is_set():
                messages = [*messages[-2:], user("book a flight to Rome")]  # one turn of history, and then anew
                body = {"model": self.model, "messages": messages, "max_tokens": 12}
                try:
                    reply = http.post(f"{self.url}/v1/chat/completions", json=body)
                except httpx2.HTTPError as error:
                    self.failed.append(repr(error))
                    return
                if reply.status_code != 200:
                    self.failed.append(reply.text)
                    continue
                found = reply.json()
                self.versions[client].append(found["system_fingerprint"])
                if reply.headers["x-turnwise-version"] != found["system_fingerprint"]:
                    self.failed.append(f"two versions: {reply.headers}")
                said = found["choices"][0]["message"]["content"] or ""
                messages = [*messages, {"role": "assistant", "content": said}] if len(messages) < 3 else []
