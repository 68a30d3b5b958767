"""A served model as its clients see it: turns, refusals, keys, what changes it and what must not."""

from __future__ import annotations

import base64
import hmac
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.commands.serve.serving import Keys, Serving
from tasks.commands.serve.versions import Found, open_source
from tasks.commands.serve.webhook import is_signed
from tests.commands.serve.alias import NAME, Alias
from tests.commands.serve.clients import ask, until, user
from tests.commands.serve.conftest import PLAY, SETTINGS

pytestmark = pytest.mark.slow
KEYS = Keys(request="k-1234-5678", webhook="w-1234-5678")


@pytest.fixture
def alias(models: list[Path]) -> Alias:
    return Alias(models[0])


@pytest.fixture
def serving(alias: Alias) -> Iterator[Serving]:
    with Serving(alias, PLAY, SETTINGS, keys=KEYS, record=None) as serving:
        yield serving


def reply(serving: Serving, messages: list[Any], **given: Any) -> dict[str, Any]:
    answered = ask(serving.gateway.url, messages, model=NAME, key=str(KEYS.request), **given)
    assert answered.status_code == 200, answered.text
    found: dict[str, Any] = answered.json()
    return found


def refusal(serving: Serving, *, key: str = str(KEYS.request), **given: Any) -> tuple[int, str | None]:
    answered = ask(serving.gateway.url, [user("hello")], **{"model": NAME, "key": key, **given})
    return answered.status_code, answered.json()["error"]["code"]


def health(serving: Serving) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.get(f"{serving.gateway.url}/health").json()
    return found


def reload(serving: Serving, body: bytes = b"", **headers: str) -> int:
    return httpx2.post(f"{serving.gateway.url}/reload", content=body, headers=headers).status_code


def test_a_conversation_goes_on_token_by_token_and_one_seed_gives_one_reply(serving: Serving):
    first = reply(serving, [user("book a flight to Rome")], seed=3, max_tokens=5)
    assert first == {**first, "model": NAME, "system_fingerprint": serving.loop.served.version}
    assert reply(serving, [user("book a flight to Rome")], seed=3, max_tokens=5)["choices"] == first["choices"]

    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    usage = reply(serving, [user("book a flight to Rome"), said, user("and one to Oslo")])["usage"]
    before = first["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == before["prompt_tokens"] + before["completion_tokens"]


def test_a_stop_string_ends_the_message_before_it(serving: Serving):
    whole = reply(serving, [user("hello")], seed=3)["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:3]
    choice = reply(serving, [user("hello")], seed=3, stop=[stop])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (whole[: whole.find(stop)], "stop")


def test_a_reply_that_the_models_own_stop_string_ended_is_whole_in_each_protocol(alias: Alias):
    stops = PLAY.sampling.model_copy(update={"stop_strings": list("aeiou"), "max_tokens_per_turn": 24})
    play = PLAY.model_copy(update={"sampling": stops})
    with Serving(alias, play, SETTINGS, keys=KEYS, record=None) as serving:
        found = reply(serving, [user("hello")], seed=3)
        assert (found["choices"][0]["finish_reason"], found["usage"]["completion_tokens"] < 24) == ("stop", True)
        url, headers = f"{serving.gateway.url}/v1/messages", {"x-api-key": str(KEYS.request)}
        body = {"model": NAME, "messages": [user("hello")], "max_tokens": 24}
        ended = httpx2.post(url, json=body, headers=headers, timeout=60).json()
        assert (ended["stop_reason"], ended["usage"]["output_tokens"] < 24) == ("end_turn", True)


@pytest.mark.parametrize(("keys", "status"), [(Keys(), 403), (KEYS, 200)])
def test_a_web_page_may_not_ask_a_server_without_a_key(alias: Alias, keys: Keys, status: int):
    with Serving(alias, PLAY, SETTINGS, keys=keys, record=None) as serving:
        headers = {"origin": "https://evil.example", "authorization": f"Bearer {KEYS.request}"}
        body = {"model": NAME, "messages": [user("hello")], "max_tokens": 2}
        asked = httpx2.post(f"{serving.gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60)
    assert asked.status_code == status


def test_what_cannot_be_honoured_is_refused_and_the_next_request_is_answered(serving: Serving):
    assert refusal(serving, key="") == (401, "invalid_api_key")
    assert refusal(serving, key="another") == (401, "invalid_api_key")
    assert refusal(serving, n=2)[0] == 400
    assert refusal(serving, model="other") == (404, "model_not_found")
    tools = [{"type": "function", "function": {"name": "book", "parameters": {"type": "object", "properties": {}}}}]
    assert refusal(serving, tools=tools, tool_choice="required", seed=1) == (422, "no_call")
    long = ask(serving.gateway.url, [user("flight " * 300)], model=NAME, key=str(KEYS.request))
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    reply(serving, [user("hello")])
    found = health(serving)
    assert (found["answered"], found["refused"], found["status"]) == (1, 6, "ok")
    assert found["last_refusal"] == "400 context_length_exceeded"  # /health asks for no key


def test_a_request_gets_the_distribution_that_the_model_was_measured_with_and_is_told(
    serving: Serving, capsys: pytest.CaptureFixture[str]
):
    """1.0 is the model's own."""
    told = list[tuple[str | None, str]]()
    for given in ({"temperature": 1.0}, {"temperature": 0.25}, {"temperature": 0.25, "top_p": 0.5}):
        answered = ask(serving.gateway.url, [user("hello")], model=NAME, key=str(KEYS.request), seed=3, **given)
        told.append((answered.headers.get("x-turnwise-ignored"), answered.json()["choices"][0]["message"]["content"]))
    assert [header for header, _ in told] == [None, "temperature", "temperature, top_p"]
    assert len({text for _, text in told}) == 1
    assert capsys.readouterr().out.count("a request sets temperature to 0.25 (1 is used): ") == 1
    assert (health(serving)["ignored"], health(serving)["refused"]) == (2, 0)


def test_the_alias_is_looked_up_when_a_signed_webhook_or_whoever_has_the_key_asks(
    serving: Serving, alias: Alias, models: list[Path]
):
    first = serving.loop.served.version
    body = json.dumps({"entity": "model_version_alias", "data": {"name": NAME, "alias": "champion"}}).encode()
    assert reload(serving, body) == 401
    assert reload(serving, body + b" ", **signed(body)) == 401  # signed for other bytes
    assert reload(serving, body, **signed(body, at=time.time() - 3600)) == 401  # an old delivery, sent once more

    alias.folder = models[1]
    assert reload(serving, body, **signed(body)) == 202
    until(lambda: serving.watcher.num_changes == 1)
    assert reply(serving, [user("hello")])["system_fingerprint"] == serving.loop.served.version != first
    alias.folder = models[0]
    login = base64.b64encode(f"any:{KEYS.request}".encode()).decode()  # http://any:KEY@… as an address
    assert reload(serving, Authorization=f"Basic {login}x") == 401
    assert reload(serving, Authorization=f"Basic {login}") == 202
    until(lambda: serving.watcher.num_changes == 2)
    assert serving.loop.served.version == first


def signed(body: bytes, *, at: float | None = None) -> dict[str, str]:
    """As MLflow signs what it delivers."""
    sent = str(int(time.time() if at is None else at))
    digest = hmac.digest(str(KEYS.webhook).encode(), f"d-1.{sent}.".encode() + body, "sha256")
    return {
        "X-MLflow-Signature": f"v1,{base64.b64encode(digest).decode()}",
        "X-MLflow-Timestamp": sent,
        "X-MLflow-Delivery-Id": "d-1",
    }


def test_our_signature_is_the_one_that_mlflow_makes():
    from mlflow.webhooks.delivery import _generate_hmac_signature

    made = _generate_hmac_signature("secret", "d-1", "1000", '{"a": 1}')
    headers = {"x-mlflow-signature": made, "x-mlflow-timestamp": "1000", "x-mlflow-delivery-id": "d-1"}
    assert is_signed(headers, b'{"a": 1}', "secret", now=1200.0)
    assert not is_signed(headers, b'{"a": 1}', "other", now=1200.0)
    assert not is_signed({**headers, "x-mlflow-delivery-id": "d-2"}, b'{"a": 1}', "secret", now=1200.0)


def test_a_version_that_cannot_answer_is_named_and_the_one_before_goes_on(
    serving: Serving, alias: Alias, models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, good = serving.loop.served.version, alias.folder
    broken = {name: tmp_path / name for name in ("nan", "torn")}
    for folder in broken.values():
        shutil.copytree(models[1], folder)
    spoil(broken["nan"] / "model.safetensors")
    (broken["torn"] / "model.safetensors").write_bytes(b"0123456789")
    for folder, why in ((broken["nan"], "a number that is not finite"), (broken["torn"], "is not served")):
        alias.folder = folder
        serving.watcher.look()
        serving.watcher.look()  # told once
        assert why in health(serving)["trouble"] and f"{first} goes on" in health(serving)["trouble"]
        assert reply(serving, [user("hello")])["system_fingerprint"] == first
        assert capsys.readouterr().err.count("warning") == 1
    alias.trouble = "the registry cannot be reached."
    serving.watcher.look()
    assert alias.trouble in health(serving)["trouble"]
    alias.trouble, alias.folder = "", good
    serving.watcher.look()
    assert health(serving)["trouble"] is None and serving.watcher.num_changes == 0


def test_a_passing_fault_is_told_and_tried_again_at_the_next_look(
    serving: Serving, alias: Alias, models: list[Path], monkeypatch: pytest.MonkeyPatch
):
    first, alias.folder = serving.loop.served.version, models[1]
    faults = [OSError("the disk was full"), TimeoutError("the store was slow")]
    now = alias.now

    def fetch() -> Path:
        if faults:
            raise faults.pop()
        return models[1]

    monkeypatch.setattr(alias, "now", lambda: Found(now().version, models[1], fetch))
    for why in ("the store was slow", "the disk was full"):
        assert reload(serving, Authorization=f"Bearer {KEYS.request}") == 202  # the thread looks, and lives
        until(lambda why=why: why in (health(serving)["trouble"] or ""))  # type: ignore[misc]
        assert "cannot be fetched" in health(serving)["trouble"] and f"{first} goes on" in health(serving)["trouble"]
    monkeypatch.setattr(alias, "tidy", lambda *kept: (_ for _ in ()).throw(OSError("no such folder")))
    assert reload(serving, Authorization=f"Bearer {KEYS.request}") == 202
    until(lambda: "no such folder" in (health(serving)["trouble"] or ""))
    assert health(serving)["version"] != first and serving.watcher.num_changes == 1
    assert reload(serving, Authorization=f"Bearer {KEYS.request}") == 202
    until(lambda: health(serving)["trouble"] is None)


def test_what_was_rolled_back_while_it_was_made_ready_never_answers(
    serving: Serving, alias: Alias, models: list[Path], monkeypatch: pytest.MonkeyPatch
):
    first, good, prepare = serving.loop.served.version, alias.folder, serving.watcher.house.prepare

    def roll_back_meanwhile(*given: Any) -> Any:
        prepared = prepare(*given)
        alias.folder = good
        return prepared

    monkeypatch.setattr(serving.watcher.house, "prepare", roll_back_meanwhile)
    alias.folder = models[1]
    serving.watcher.look()
    assert reply(serving, [user("hello")])["system_fingerprint"] == first
    assert health(serving)["trouble"] is None and serving.watcher.num_changes == 0


def spoil(file: Path) -> None:
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})


def test_an_engine_that_dies_answers_those_who_wait_with_an_error(serving: Serving):
    def die(until: Any) -> None:
        raise RuntimeError("out of memory")

    serving.loop.served.engine.poll = die  # type: ignore[method-assign,assignment]
    assert refusal(serving)[0] == 503
    assert refusal(serving) == (503, "server_ending")
    assert health(serving)["status"] == "failed" and "out of memory" in str(serving.loop.fault)


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config.json.*models:/NAME@champion"):
        open_source(str(tmp_path), tmp_path, None)
