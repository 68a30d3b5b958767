"""A pause that an endpoint asks for is made, however it is worded, up to the longest; and no request is repeated more
often than its setting says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tasks.core import background
from tasks.tools.base import EnvironmentFault
from tasks.tools.judge.judge import Judge
from tasks.tools.patient_client import PatientClient, refuses_every_request
from tests.tools.judge.endpoint import Endpoint, judge_settings, serve
from tests.tools.judge.test_judge import NO_QUOTA, ask

REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serve(Endpoint()) as made:
        yield made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each pause, none of which takes any time."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(PatientClient, "sleep", staticmethod(sleep))
    return made


def complete(endpoint: Endpoint, folder: Path, *, max_retries: int) -> bytes:
    async def whole() -> bytes:
        client = PatientClient(judge_settings(endpoint, folder, max_retries=max_retries), "")
        try:
            return await client.complete(REQUEST)
        finally:
            await client.close()

    return background.run(whole()).result(60)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("seconds", [121, 600])
@pytest.mark.parametrize("is_a_date", [False, True])
def test_a_long_pause_is_made_in_seconds_or_up_to_a_date(
    endpoint: Endpoint,
    pauses: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    seconds: int,
    is_a_date: bool,
) -> None:
    """The `openai` client waits no longer than 120 s, and repeats nothing where it should."""
    now = time.time() // 1 + 1  # it reads a date by its own clock, which is a little behind
    monkeypatch.setattr(PatientClient, "now", staticmethod(lambda: now))
    endpoint.failures = [(status, formatdate(now + seconds, usegmt=True) if is_a_date else str(seconds))]
    assert b"So it is." in complete(endpoint, tmp_path, max_retries=1)
    assert (pauses, len(endpoint.asked)) == ([seconds], 2)


def test_a_request_is_repeated_as_often_as_the_setting_says_whoever_waits(
    endpoint: Endpoint, pauses: list[float], tmp_path: Path
) -> None:
    from openai import OpenAIError

    endpoint.failures = [(429, "121")] * 9
    with pytest.raises(OpenAIError):
        complete(endpoint, tmp_path, max_retries=5)
    assert (pauses, len(endpoint.asked)) == ([121] * 5, 6)
    pauses.clear()
    endpoint.asked.clear()
    endpoint.failures = [(503, "0.01"), (429, "121"), (503, "0.01"), (429, "121"), 503]
    with pytest.raises(OpenAIError):
        complete(endpoint, tmp_path, max_retries=3)
    assert (pauses, len(endpoint.asked)) == ([121], 4)


def test_the_first_pause_alone_is_told_and_as_what_one_request_does(
    endpoint: Endpoint, pauses: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.failures = [(429, "121"), (429, "300")]
    complete(endpoint, tmp_path, max_retries=2)
    told = capsys.readouterr().err
    assert pauses == [121, 300]
    assert told.count("asks for a pause") == told.count("of 121 s (Retry-After), so a request waits.") == 1


@pytest.mark.parametrize("retry_after", ["nan", "inf", "-121", "soon", formatdate(0, usegmt=True)])
def test_what_asks_for_no_pause_is_left_to_the_client(
    endpoint: Endpoint, pauses: list[float], tmp_path: Path, retry_after: str
) -> None:
    endpoint.failures = [(429, retry_after)]
    assert b"So it is." in complete(endpoint, tmp_path, max_retries=1)
    assert (pauses, len(endpoint.asked)) == ([], 2)


def test_no_pause_is_made_where_none_helps(endpoint: Endpoint, pauses: list[float], tmp_path: Path) -> None:
    from openai import BadRequestError, RateLimitError

    endpoint.failures = [(400, "121")]
    with pytest.raises(BadRequestError):
        complete(endpoint, tmp_path, max_retries=5)
    endpoint.failures, endpoint.body_of_failure = [(429, "121")], NO_QUOTA
    with pytest.raises(RateLimitError):
        complete(endpoint, tmp_path, max_retries=5)
    assert (pauses, len(endpoint.asked)) == ([], 2)


@pytest.mark.parametrize("is_a_date", [False, True])
def test_a_pause_beyond_the_longest_is_a_fault_that_names_it(
    endpoint: Endpoint, pauses: list[float], tmp_path: Path, is_a_date: bool
) -> None:
    endpoint.failures = [(429, formatdate(time.time() + 3600, usegmt=True) if is_a_date else "3600")]
    told = r"^judge: rate_limited: .* a pause of 3,[56]\d\d s .* 600 s is the longest"
    with pytest.raises(EnvironmentFault, match=told):
        ask(Judge(judge_settings(endpoint, tmp_path, max_retries=5)))
    assert (pauses, len(endpoint.asked)) == ([], 1)


def test_an_endless_pause_is_no_number(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.failures = [(429, "inf")]
    with pytest.raises(EnvironmentFault) as fault:
        ask(Judge(judge_settings(endpoint, tmp_path, max_retries=0)))
    assert "Retry-After" not in str(fault.value)


def test_an_endpoint_that_is_away_is_told_once_before_the_repeats(
    endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two connections fail, 0.5 s apart; at a port where nobody listens."""
    settings = judge_settings(endpoint, tmp_path, max_retries=1).model_copy(update={"url": "http://127.0.0.1:9/v1"})
    with pytest.raises(EnvironmentFault, match="the endpoint failed"):
        ask(Judge(settings))
    said = capsys.readouterr().err
    assert said.count("http://127.0.0.1:9/v1 does not answer") == 1 and "for up to 0.5 s" in said


def test_closing_ends_a_pause(endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint.failures = [(429, "600")]

    async def close_early() -> None:
        client = PatientClient(judge_settings(endpoint, tmp_path), "")
        asking = asyncio.create_task(client.complete(REQUEST))
        while not client._pauses:
            await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await asking

    background.run(close_early()).result(60)
    assert len(endpoint.asked) == 1
    assert f"{endpoint.url} asks for a pause of 600 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "This model's maximum context length is 8192 tokens."),
        (400, "the request exceeds the available context size, try increasing it"),
        (400, "prompt is too long: 210000 tokens > 200000 maximum"),
        (400, "The input token count (1100000) exceeds the maximum number of tokens allowed (1048576)."),
        (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"),
        (400, "Range of input length should be [1, 30720]"),
        (400, "Invalid prompt: your prompt was flagged as potentially violating our usage policy."),
        (400, "The prompt triggered Azure OpenAI's content management policy."),
        (403, "Your chosen model requires moderation and your input was flagged."),
        (400, "Input data may contain inappropriate content."),
    ],
)
def test_a_first_text_that_is_refused_is_known_in_the_words_of_each_server(
    endpoint: Endpoint, tmp_path: Path, status: int, message: str
) -> None:
    """Else a run would end, and end again at each start, for one text."""
    from openai import APIStatusError

    error = message if status == 422 else {"message": message}  # TGI's
    endpoint.failures, endpoint.body_of_failure = [status], json.dumps({"error": error}).encode()
    with pytest.raises(APIStatusError) as refused:
        complete(endpoint, tmp_path, max_retries=0)
    assert not refuses_every_request(refused.value, has_answered=False)
