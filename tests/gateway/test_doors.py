"""A gateway that asks for no key: programs of this machine are answered, and web pages refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx2
import pytest

from tasks.gateway.server import Gateway
from tests.gateway.scripted import MODEL, ScriptedBackend, turn

ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}]}
OF_MESSAGES: dict[str, Any] = {**ASKED, "max_tokens": 9}
JSON = {"content-type": "application/json"}


class Keyless(ScriptedBackend):
    def models(self, key: str) -> Sequence[str]:
        return [MODEL]


@pytest.fixture(scope="module")
def backend() -> Keyless:
    return Keyless(lambda request: turn("Hello."))


@pytest.fixture(scope="module")
def keyless(backend: Keyless) -> Iterator[Gateway]:
    def reload(headers: Mapping[str, str], body: bytes) -> tuple[int, Mapping[str, Any]]:
        return 202, {}

    with Gateway(backend, hooks={"/reload": reload}, is_keyless=True) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({**JSON, "origin": "https://evil.example"}, 403, "foreign_origin"),
        ({**JSON, "origin": "null"}, 403, "foreign_origin"),
        ({**JSON, "origin": "http://127.0.0.1.evil.example"}, 403, "foreign_origin"),
        ({**JSON, "host": "evil.example"}, 403, "foreign_host"),
        ({**JSON, "host": "["}, 403, "foreign_host"),
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({}, 415, "unsupported_media_type"),
    ],
)
def test_what_a_web_page_may_send_is_refused_with_what_to_do(
    keyless: Gateway, backend: Keyless, headers: dict[str, str], status: int, code: str
):
    reply = httpx2.post(f"{keyless.openai_url}/chat/completions", headers=headers, content=json.dumps(ASKED))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], backend.requests) == (status, code, [])
    assert "serve.key_variable" in error["message"] and "\n" not in error["message"]


def test_no_other_path_is_open_to_a_page_and_anthropics_clients_get_their_shape(keyless: Gateway):
    evil = {"origin": "https://evil.example"}
    assert httpx2.get(f"{keyless.url}/health", headers={"host": "evil.example"}).status_code == 403
    assert httpx2.get(f"{keyless.openai_url}/models", headers=evil).status_code == 403
    assert httpx2.post(f"{keyless.url}/reload", headers=evil).status_code == 403
    refused = httpx2.post(f"{keyless.url}/v1/messages", headers={**JSON, **evil}, content=json.dumps(OF_MESSAGES))
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


def test_every_refusal_is_counted_and_of_the_last_nothing_is_told_that_the_request_says(
    keyless: Gateway, backend: Keyless
):
    def ask(**changed: Any) -> int:
        given = {**ASKED, **changed}
        return httpx2.post(f"{keyless.openai_url}/chat/completions", headers=JSON, json=given).status_code

    before, script = keyless.refusals.num, backend.script
    counted = [
        httpx2.get(f"{keyless.url}/health", headers={"host": "evil.example"}).status_code,
        httpx2.get(f"{keyless.url}/v2/models").status_code,
        httpx2.get(f"{keyless.openai_url}/chat/completions").status_code,
        ask(n=2),
        ask(model="x" * 200 + "\n"),
    ]
    assert (counted, keyless.refusals.num - before) == ([403, 404, 405, 400, 404], 5)
    assert keyless.refusals.last == "404 model_not_found"
    backend.script = lambda request: RuntimeError("a fault of ours")
    assert (ask(), keyless.refusals.num - before) == (500, 6)
    backend.script = script
    assert (ask(), keyless.refusals.num - before) == (200, 6)


@pytest.mark.parametrize(
    "headers",
    [{}, {"host": "localhost:80"}, {"host": "[::1]:80"}, {"host": "127.8.0.1"}, {"origin": "http://localhost:3000"}],
)
def test_programs_and_pages_of_this_machine_are_answered(keyless: Gateway, headers: dict[str, str]):
    reply = httpx2.post(f"{keyless.openai_url}/chat/completions", headers=headers, json=ASKED)
    assert reply.status_code == 200
    assert httpx2.post(f"{keyless.url}/reload", headers=headers).status_code == 202


@pytest.mark.slow
def test_the_official_clients_and_curl_are_answered(keyless: Gateway):
    from anthropic import Anthropic
    from openai import OpenAI

    with OpenAI(base_url=keyless.openai_url, api_key="x", max_retries=0) as client:
        assert client.chat.completions.create(**ASKED).choices[0].message.content == "Hello."
        assert client.responses.create(model=MODEL, input="Hello?").output_text == "Hello."
    with Anthropic(base_url=keyless.url, api_key="x", max_retries=0) as anthropic:
        assert anthropic.messages.create(**OF_MESSAGES).content[0].text == "Hello."
        with anthropic.messages.stream(**OF_MESSAGES) as pieces:
            assert pieces.get_final_text() == "Hello."
    if (curl := shutil.which("curl")) is not None:
        asked = [curl, "-s", f"{keyless.openai_url}/chat/completions", "-H", "Content-Type: application/json"]
        told = subprocess.run([*asked, "-d", json.dumps(ASKED)], capture_output=True, check=True).stdout
        assert json.loads(told)["choices"][0]["message"]["content"] == "Hello."
