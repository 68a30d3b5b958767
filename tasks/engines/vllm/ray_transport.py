"""How a process on Ray's cluster reaches the host of a vLLM server (`on_ray.py`): an actor that the launcher named."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import httpx2

from tasks.core.text import one_line
from tasks.engines.vllm.server_process import ServerDown
from tasks.rollouts.settings import SERVERS_ON_RAY


class HostTransport(httpx2.AsyncBaseTransport):
    """Requests to the server of the host with this name."""

    def __init__(self, name: str):
        self.host = host_of(name)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = await request.aread()
        kept = [(name, value) for name, value in request.headers.raw if name.lower() in (b"content-type", b"accept")]
        try:
            answer = await self.host.ask.remote(request.method, request.url.raw_path.decode(), kept, body)
        except Exception as error:
            raise httpx2.ConnectError(told(error), request=request) from None
        status, headers, content = answer
        return httpx2.Response(status, headers=headers, content=content, request=request)


def host_of(name: str) -> Any:
    """The actor that the launcher placed. ServerDown where it is gone for good."""
    _connect_once()
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:  # Ray's lines guess at causes that are not so here
        raise ServerDown(f"Ray has no host {name} left, which died too often") from None


@cache
def _connect_once() -> None:
    """To the cluster that the launcher named."""
    import logging

    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # else a warning that this thread hears no signals
    address, _, namespace = os.environ[SERVERS_ON_RAY].partition(" ")
    ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)


def told(error: Exception) -> str:
    """The first line: Ray's messages have one for each thing that may be so."""
    cause = getattr(error, "cause", None)
    first, _, _ = str(error).strip().partition("\n")
    return one_line(cause or f"{type(error).__name__} of Ray: {first}", limit=200)
