"""Waits for the servers in `engine.settings.urls`: a job starts them at the same moment as the stage that uses them.

A server loads for minutes before it listens. Another program at its address is told at once.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence

from tasks.core.passing_faults import PassingFault, causes
from tasks.core.terminal import tell
from tasks.engines.vllm.client import BUSY, VLLMClient
from tasks.engines.vllm.server_process import ServerDown

LOOK_AGAIN_SECONDS = 1.0


async def wait_for(clients: Sequence[VLLMClient], seconds: float) -> None:
    """Until all servers are up. PassingFault after `seconds`; ValueError where one is no vLLM server."""
    begin, is_told = time.monotonic(), False
    while True:
        seen = await asyncio.gather(*map(_what_is_amiss, clients))
        away = [f"{client.url} ({told})" for client, told in zip(clients, seen, strict=True) if told]
        if not away:
            return
        which = f"{len(away)} of {len(clients)} vLLM servers in engine.settings.urls: first {away[0]}"
        if time.monotonic() - begin >= seconds:
            raise PassingFault(
                f"No answer within {seconds:g} s (engine.settings.start_timeout_seconds) from {which}. Without them "
                f"there are no rollouts. Start them, or correct engine.settings.urls, and run again."
            )
        if not is_told:
            is_told = True
            tell(f"Waits up to {seconds:g} s (engine.settings.start_timeout_seconds) for {which}.")
        await asyncio.sleep(min(LOOK_AGAIN_SECONDS, seconds))


async def _what_is_amiss(client: VLLMClient) -> str:
    """Why the server is not up yet, "" where it is."""
    try:
        status = await client.health()
    except ServerDown as down:
        if any(isinstance(cause, ssl.SSLError) for cause in causes(down)):
            raise ValueError(
                f"{client.url}: there is no encrypted connection to it ({down}), so waiting would not help. Correct "
                f"engine.settings.urls, perhaps to http://, or the server's certificate."
            ) from None
        return str(down)
    if status == 200:
        return ""
    if status >= 500 or status in BUSY:
        return f"status {status} at /health"
    raise ValueError(
        f"{client.url}: answers /health with status {status}, so it is no vLLM server, or it wants a key, and "
        f"turnwise sends none. Correct engine.settings.urls."
    )
