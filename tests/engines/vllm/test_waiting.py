"""Servers in `engine.settings.urls` that start while a stage waits for them, and addresses of other programs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tasks.core.background import run
from tasks.core.passing_faults import PassingFault
from tasks.engines.vllm import waiting
from tasks.engines.vllm.client import VLLMClient
from tasks.engines.vllm.server_engine import _check_routes
from tasks.engines.vllm.waiting import wait_for
from tests import tiny

PATIENCE = 120  # seconds, on a busy machine


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_AGAIN_SECONDS", 0.01)


class Program:
    """Answers with a status per path, 404 where it has none. One that is loading does not listen yet."""

    def __init__(self, statuses: dict[str, int]):
        self.statuses, self.asked = statuses, list[str]()
        program = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                program.asked.append(self.path)
                body = json.dumps({"weight_version": "default"}).encode()
                self.send_response(program.statuses.get(self.path, 404))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Tests need no access log."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.server.server_bind()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def listen(self) -> None:
        self.server.server_activate()
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@contextmanager
def program(*, is_loading: bool = False, **statuses: int) -> Iterator[Program]:
    made = Program({f"/{path}": status for path, status in statuses.items()})
    if not is_loading:
        made.listen()
    yield made
    if not is_loading:
        made.server.shutdown()
    made.server.server_close()


def client(url: str) -> VLLMClient:
    return VLLMClient(
        url, model="m", sampling=tiny.SAMPLING, end_ids=(3,), vocabulary_size=9, timeout_seconds=float(PATIENCE)
    )


def test_servers_that_are_still_loading_are_waited_for_and_one_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One does not listen yet, one says that it is not ready, one is up."""
    with program(is_loading=True, health=200) as late, program(health=503) as busy, program(health=200) as up:
        waits = run(wait_for([client(item.url) for item in (late, busy, up)], PATIENCE))
        while len(up.asked) < 3:
            assert not waits.done()
        late.listen()
        busy.statuses["/health"] = 200
        waits.result(PATIENCE)
        late.server.shutdown()
    (line,) = capsys.readouterr().out.splitlines()
    assert f"first {late.url} (ConnectError" in line
    assert "2 of 3" in line and "up to 120 s (engine.settings.start_timeout_seconds)" in line


def test_before_the_first_weights_servers_are_waited_for_too() -> None:
    with program(is_loading=True, health=200, weight_info=200) as late:
        waits = run(_check_routes([client(late.url)], PATIENCE))
        late.listen()
        waits.result(PATIENCE)
        late.server.shutdown()
    assert late.asked == ["/health", "/weight_info"]


def test_servers_that_do_not_come_end_the_stage_for_a_later_start() -> None:
    with (
        program(is_loading=True) as late,
        pytest.raises(PassingFault, match=rf"within 0\.05 s .*start_timeout_seconds\) from 1 of 1 .* {late.url}") as e,
    ):
        run(wait_for([client(late.url)], 0.05)).result(PATIENCE)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("status", [302, 401, 403, 404])
def test_another_program_at_the_address_is_told_at_once(status: int) -> None:
    with (
        program(is_loading=True) as late,
        program(health=status) as other,
        pytest.raises(ValueError, match=rf"^{other.url}: .*status {status}.* no vLLM .*engine\.settings\.urls") as e,
    ):
        run(wait_for([client(late.url), client(other.url)], PATIENCE)).result(PATIENCE)
    assert not isinstance(e.value, PassingFault)


def test_an_address_with_https_of_a_server_without_is_told_at_once() -> None:
    with program(health=200) as up, pytest.raises(ValueError, match=r"no encrypted connection .* perhaps to http://"):
        run(wait_for([client(up.url.replace("http:", "https:"))], PATIENCE)).result(PATIENCE)


def test_a_socket_that_is_not_there_yet_is_waited_for() -> None:
    with pytest.raises(PassingFault, match=r"unix:/nowhere/server \(ConnectError"):
        run(wait_for([client("unix:/nowhere/server")], 0.05)).result(PATIENCE)
