"""What may go wrong around a turn: agents that hang up or come in crowds, and a gateway that closes or starts again."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import httpx2
import openai
import pytest

from tasks.gateway import server
from tasks.gateway.completions import ProtocolError
from tasks.gateway.server import Gateway
from tests.gateway.scripted import KEY, MODEL, ScriptedBackend, turn

HEADERS = {"Authorization": f"Bearer {KEY}"}
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}]}


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_hangs_up_cancels_its_turn(gateway, backend, stream):
    backend.script = lambda request: None
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as agent:
        agent.sendall(head.encode() + body)
        until(lambda: len(backend.open) == 1)
        if stream:
            assert agent.recv(4096).startswith(b"HTTP/1.1 200")  # it has begun, and is kept alive by comments
    waiting = backend.open.pop()
    until(waiting.cancelled)


@pytest.mark.parametrize("stream", [False, True])
def test_a_version_of_any_letters_is_told_in_a_header(gateway, backend, stream):
    """Headers are Latin-1, and a folder may be called anything."""
    backend.script = lambda request: dataclasses.replace(turn("Hello."), version="模型 100%\n/é@0a1b")
    reply = httpx2.post(f"{gateway.openai_url}/chat/completions", headers=HEADERS, json={**BODY, "stream": stream})
    assert reply.status_code == 200
    if not stream:
        assert reply.json()["system_fingerprint"] == "模型 100%\n/é@0a1b"
    told = reply.headers["x-turnwise-version"]
    assert told == "%E6%A8%A1%E5%9E%8B%20100%25%0A/%C3%A9@0a1b"
    assert unquote(told) == "模型 100%\n/é@0a1b"


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_not_used_of_a_request_is_told_in_a_header(gateway, backend, stream):
    for ignored, header in ((["temperature", "top_p"], "temperature, top_p"), ([], None)):
        backend.script = lambda request, names=ignored: dataclasses.replace(turn("Hello."), ignored=names)
        reply = httpx2.post(f"{gateway.openai_url}/chat/completions", headers=HEADERS, json={**BODY, "stream": stream})
        assert reply.headers.get("x-turnwise-ignored") == header
        assert (": x-turnwise-ignored: temperature, top_p\n" in reply.text) == (stream and header is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("status", "num_requests"), [(409, 1), (500, 1), (503, 2)])
def test_clients_ask_again_only_where_the_answer_may_be_another(clients, backend, status, num_requests):
    backend.script = lambda request: ProtocolError(status, "Not now.")
    first = len(backend.requests)
    with pytest.raises(openai.APIStatusError, match="Not now"):
        clients["chat"].client.with_options(max_retries=1).chat.completions.create(**BODY)
    assert len(backend.requests) == first + num_requests


@pytest.mark.slow
def test_sixty_four_agents_wait_side_by_side_and_each_gets_its_own_turn(gateway, backend):
    backend.script = lambda request: None

    def ask(number: int) -> str:
        body = {**BODY, "messages": [{"role": "user", "content": str(number)}]}
        reply = client.post(f"{gateway.openai_url}/chat/completions", headers=HEADERS, json=body)
        return reply.json()["choices"][0]["message"]["content"]

    first = len(backend.requests)
    client = httpx2.Client(timeout=60, limits=httpx2.Limits(max_connections=64))
    with client, ThreadPoolExecutor(64) as agents:
        heard = agents.map(ask, range(64))
        until(lambda: len(backend.open) == 64)
        for request, answer in zip(backend.requests[first:], list(backend.open), strict=True):
            answer.set_result(turn(f"for {request.messages[0]['content']}"))
        backend.open.clear()
        assert list(heard) == [f"for {number}" for number in range(64)]


@pytest.mark.slow
def test_a_gateway_that_closes_answers_those_who_wait_and_can_start_again_at_its_port():
    backend = ScriptedBackend(lambda request: None)
    gateway = Gateway(backend)
    gateway.start()
    with ThreadPoolExecutor(2) as agents:
        waiting = [
            agents.submit(httpx2.post, f"{gateway.openai_url}/chat/completions", headers=HEADERS, json=body, timeout=60)
            for body in (BODY, {**BODY, "stream": True})
        ]
        until(lambda: len(backend.open) == 2)
        gateway.close()
        gateway.close()
        replies = [reply.result() for reply in waiting]
    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [(503, "gateway_closing")] * 2
    assert all(answer.cancelled() for answer in backend.open)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{gateway.url}/health")

    backend.script = lambda request: turn("Hello.")
    with Gateway(backend, port=gateway.port) as again:
        assert httpx2.get(f"{again.url}/health").json() == {"status": "ok"}
        with pytest.raises(ValueError, match="Choose another port"):
            Gateway(backend, port=again.port).start()


@pytest.mark.slow
@pytest.mark.parametrize("stalled", ["half a body", "half a hook's body", "a reply", "a stream"])
def test_a_client_that_stalls_holds_no_gateway_that_closes_and_nothing_is_logged(stalled, monkeypatch, caplog):
    monkeypatch.setattr(server, "CLOSE_SECONDS", 0.5)
    written = "x" * 30_000_000  # more than the buffers of both sides
    gateway = Gateway(
        ScriptedBackend(lambda request: turn(written)), hooks={"/reload": lambda headers, body: (202, {})}
    )
    path = "/reload" if "hook" in stalled else "/v1/chat/completions"
    body = json.dumps({**BODY, "stream": stalled == "a stream"}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    with gateway, socket.create_connection(("127.0.0.1", gateway.port)) as agent:
        agent.sendall(head.encode() + (body[:10] if "body" in stalled else body))
        assert "body" in stalled or agent.recv(9) == b"HTTP/1.1 "
        time.sleep(0.1)  # it waits for the rest
        gateway.close()
        gateway.wait()
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": "\\ud800"}', "it contains half a surrogate pair"),
        (b'{"a": "\xed\xa0\x80"}', "it contains half a surrogate pair"),
        (b'{"\xed\xbf\xbf": 1}', "it contains half a surrogate pair"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"),
    ],
)
def test_a_body_that_is_no_request_is_refused_in_the_protocols_shape(gateway, body, words):
    reply = httpx2.post(f"{gateway.url}/v1/messages", headers={"x-api-key": KEY}, content=body)
    assert (reply.status_code, reply.json()["type"]) == (400, "error")
    assert words in reply.json()["error"]["message"]


@pytest.mark.slow
def test_other_paths_and_hooks_and_health_answer_in_json():
    told: list[bytes] = []

    def reload(headers, body: bytes):
        told.append(body)
        return 202, {"was": headers["x-signed"]}

    gateway = Gateway(ScriptedBackend(lambda request: turn("")), health=lambda: {"version": "policy/3"}, hooks={
        "/reload": reload})  # fmt: skip
    with gateway:
        assert httpx2.get(f"{gateway.url}/health").json() == {"version": "policy/3"}
        reply = httpx2.post(f"{gateway.url}/reload", headers={"x-signed": "yes"}, content=b"now")
        assert (reply.status_code, reply.json(), told) == (202, {"was": "yes"}, [b"now"])
        missing = httpx2.get(f"{gateway.url}/v1/embeddings", headers=HEADERS)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        anthropic = {**HEADERS, "anthropic-version": "2023-06-01"}
        for path, headers in (("/v1/messages/count_tokens", HEADERS), ("/v1/complete", anthropic)):
            missing = httpx2.post(f"{gateway.url}{path}", headers=headers, json={})
            assert (missing.status_code, missing.json()["type"]) == (404, "error")
            assert missing.json()["error"]["type"] == "not_found_error"
        wrong = httpx2.get(f"{gateway.url}/v1/chat/completions", headers=HEADERS)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        listed = httpx2.get(f"{gateway.url}/v1/models", headers=HEADERS).json()
        assert [model["id"] for model in listed["data"]] == [MODEL]
