"""The `openai` client as turnwise asks an endpoint: within bounds on time and memory, with the pauses it asks for, and
with one rule for which of its answers refuse every request.

The `openai` client repeats a failed request `max_retries` times. Where Retry-After is over two minutes it gives up
instead; then the pause is made here, if it is no longer than LONGEST_PAUSE_SECONDS, and the request is repeated.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Protocol

from tasks.core.terminal import warn

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAIError

LONGEST_PAUSE_SECONDS = 600.0
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 8.0  # of the `openai` client, doubled for each repeat
TRANSIENT = (408, 409, 429)
OF_THE_ACCOUNT = (401, 402)
NO_QUOTA = "insufficient_quota"  # has the status of a pause, 429, and none helps
# How a refusal names its text, in lower case: a setting is not what it names.
FULL_CONTEXT = (
    "context_length_exceeded", "maximum context length", "context window",  # OpenAI's, vLLM's and others'
    "max_tokens must be at least 1",  # vLLM's when the prompt leaves no room: turnwise never asks for fewer than 1
    "exceeds the available context size",  # llama.cpp's
    "prompt is too long",  # Anthropic's
    "input token count",  # Gemini's
    "`inputs` tokens + `max_new_tokens` must be <=", "`inputs` must have less than",  # TGI's
    "range of input length",  # DashScope's
)  # fmt: skip
FILTERED = (
    "content_filter", "content management policy",  # Azure's
    "prompt was flagged",  # OpenAI's
    "input was flagged", "flagged by moderation",  # OpenRouter's
    "inappropriate content",  # DashScope's
)  # fmt: skip


class EndpointSettings(Protocol):
    @property
    def url(self) -> str | None: ...
    @property
    def model(self) -> str: ...
    @property
    def api_key_variable(self) -> str | None: ...
    @property
    def timeout_seconds(self) -> float: ...
    @property
    def max_retries(self) -> int: ...


class PatientClient:
    """`sleep` and `now` (seconds since 1970) are of the machine; tests bring their own."""

    sleep = staticmethod(asyncio.sleep)
    now = staticmethod(time.time)

    def __init__(self, settings: EndpointSettings, key: str):
        from openai import AsyncOpenAI

        from tasks.core.bounded_http import BoundedClient

        self.url = settings.url
        self.client = AsyncOpenAI(
            base_url=settings.url,
            api_key=key or "none",
            timeout=settings.timeout_seconds,
            max_retries=settings.max_retries,
            http_client=BoundedClient(
                total_seconds=settings.timeout_seconds, on_no_connection=self._tell_of_no_connection
            ),
        )
        self._pauses, self._has_told_of_a_pause = set[asyncio.Task[None]](), False
        self._has_told_of_no_connection = False

    async def complete(self, request: Mapping[str, Any]) -> bytes:
        """The answer of the endpoint's chat completions, unread; OpenAIError after the last repeat."""
        from openai import APIStatusError

        asking, num_left = self.client, self.client.max_retries
        while True:
            try:
                return (await asking.chat.completions.with_raw_response.create(**request)).content
            except APIStatusError as error:
                num_left -= _num_repeats(error) + 1
                seconds = seconds_of_pause(error, self.now())
                if num_left < 0 or not _may_pass(error) or seconds is None or seconds > LONGEST_PAUSE_SECONDS:
                    raise
            await self._pause(seconds)
            asking = self.client.with_options(max_retries=num_left)

    def in_words(self, error: OpenAIError) -> str:
        """What the endpoint failed at."""
        from openai import APIStatusError

        if not isinstance(error, APIStatusError):
            return f"{error} {error.__cause__ or ''}"
        seconds = seconds_of_pause(error, self.now())
        if seconds is None or seconds <= LONGEST_PAUSE_SECONDS:
            return str(error)
        longest = f"{LONGEST_PAUSE_SECONDS:g} s is the longest pause that is made"
        return f"it asks for a pause of {seconds:,.0f} s (Retry-After), and {longest}: {error}"

    async def close(self) -> None:
        """Requests in a pause are cancelled."""
        for pause in self._pauses:
            pause.cancel()
        await self.client.close()

    def _tell_of_no_connection(self, error: Exception) -> None:
        """Before the repeats, which take half a minute with the settings of most."""
        most = sum(
            min(FIRST_PAUSE_SECONDS * 2**number, MOST_PAUSE_SECONDS) for number in range(self.client.max_retries)
        )
        if most and not self._has_told_of_no_connection:
            self._has_told_of_no_connection = True
            warn(f"{self.url} does not answer ({error}); a request is tried again for up to {most:g} s")

    async def _pause(self, seconds: float) -> None:
        if not self._has_told_of_a_pause:
            self._has_told_of_a_pause = True
            warn(
                f"{self.url} asks for a pause of {seconds:,.0f} s (Retry-After), so a request waits. This is said once."
            )
        pause = asyncio.ensure_future(self.sleep(seconds))
        self._pauses.add(pause)
        try:
            await pause
        finally:
            self._pauses.discard(pause)


def seconds_of_pause(error: APIStatusError, now: float) -> float | None:
    """What Retry-After says, in seconds or as a date (RFC 9110, 10.2.3); None where it asks for no pause. OpenAI sends
    milliseconds too, in a header of their own, which the `openai` client reads first.
    """
    headers = error.response.headers
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / per_second
        except ValueError:
            continue
        return seconds if 0 < seconds < math.inf else None
    try:
        seconds = parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - now
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if seconds > 0 else None


def refuses_every_request(error: APIStatusError, *, has_answered: bool) -> bool:
    """Whether the next request would be refused too. An endpoint that has answered refuses one text, unless it names
    the account; one that never did refuses all, unless it names the text: its length, or a filter.
    """
    status = error.status_code
    if status in OF_THE_ACCOUNT or _has_no_quota(error):
        return True
    is_refusal = 400 <= status < 500 and status not in TRANSIENT
    is_of_one_text = status == 413 or says(error, *FULL_CONTEXT, *FILTERED)
    return is_refusal and not has_answered and not is_of_one_text


def says(error: APIStatusError, *words: str) -> bool:
    told = error.body if isinstance(error.body, str) else ""  # TGI's, which `openai` puts in no message
    said = f"{error.code or ''} {error.message} {told}".lower()
    return any(word in said for word in words)


def _may_pass(error: APIStatusError) -> bool:
    """Whether the same request may be answered later."""
    is_transient = error.status_code in TRANSIENT or error.status_code >= 500
    return is_transient and not _has_no_quota(error) and error.response.headers.get("x-should-retry") != "false"


def _has_no_quota(error: APIStatusError) -> bool:
    return error.status_code == 429 and says(error, NO_QUOTA)


def _num_repeats(error: APIStatusError) -> int:
    """How often the `openai` client had already repeated the request that failed, which it tells the endpoint too."""
    return int(error.request.headers.get("x-stainless-retry-count", 0))
