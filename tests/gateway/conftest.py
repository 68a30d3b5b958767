"""A gateway over a scripted backend, and the clients that people use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasks.gateway.server import Gateway
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
def openai_client(gateway: Gateway):
    from openai import OpenAI

    with OpenAI(base_url=gateway.openai_url, api_key=KEY, max_retries=0) as client:
        yield client
