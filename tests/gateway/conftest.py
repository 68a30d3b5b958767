"""A gateway over a scripted backend, and the clients that people use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tasks.gateway.server import Gateway
from tests.gateway.clients import ChatClient, Client, MessagesClient, ResponsesClient
from tests.gateway.scripted import KEY, ScriptedBackend, ScriptedHost, turn


@pytest.fixture(scope="session")
def backend() -> ScriptedBackend:
    """Tests set its `script`."""
    return ScriptedBackend(lambda request: turn("Hello."))


@pytest.fixture(scope="session")
def gateway(backend: ScriptedBackend) -> Iterator[Gateway]:
    with Gateway(backend, tools=ScriptedHost(), keep_alive_seconds=0.05) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def clients(gateway: Gateway) -> Iterator[dict[str, Client]]:
    """By protocol. They do not try again."""
    from anthropic import Anthropic
    from openai import OpenAI

    with ExitStack() as stack:
        openai = stack.enter_context(OpenAI(base_url=gateway.openai_url, api_key=KEY, max_retries=0))
        anthropic = stack.enter_context(Anthropic(base_url=gateway.url, api_key=KEY, max_retries=0))
        yield {"chat": ChatClient(openai), "responses": ResponsesClient(openai), "messages": MessagesClient(anthropic)}


@pytest.fixture(params=["chat", "responses", "messages"])
def client(request: pytest.FixtureRequest, clients: dict[str, Client]) -> Client:
    return clients[request.param]
