"""What the gateway adds to a turn: milliseconds per request and agents at once, over a backend that costs nothing.

Written to artifacts/bench/gateway.json. CPU time of the whole process, client and server, beside the wall, since
machines are shared. A history has 60 messages of 300 characters, as a long episode's.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import httpx2
import pytest

from tasks.core.files import write_json
from tasks.gateway.server import Gateway
from tests.conftest import ROOT
from tests.gateway.scripted import KEY, MODEL, ScriptedBackend, turn

pytestmark = pytest.mark.bench

HEADERS = {"x-api-key": KEY}
NUM_AGENTS, NUM_TURNS, ROUNDS = 64, 10, 3
SPOKEN = [{"role": role, "content": "x" * 300} for _ in range(30) for role in ("user", "assistant")]
HISTORY = [*SPOKEN, {"role": "user", "content": "Go on."}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HISTORY}),
    "responses": ("/v1/responses", {"input": HISTORY}),
    "messages": ("/v1/messages", {"messages": HISTORY, "max_tokens": 9}),
}


async def play(gateway: Gateway, path: str, body: dict[str, Any], *, num_agents: int) -> None:
    """Agents side by side, each with a connection that it keeps; NUM_TURNS requests each."""
    async with httpx2.AsyncClient(timeout=120, limits=httpx2.Limits(max_connections=num_agents)) as client:

        async def one() -> None:
            for _ in range(NUM_TURNS):
                reply = await client.post(f"{gateway.url}{path}", headers=HEADERS, json={"model": MODEL, **body})
                assert reply.status_code == 200

        await asyncio.gather(*(one() for _ in range(num_agents)))


def test_what_a_turn_costs_beside_its_sampling():
    figures: dict[str, Any] = {}
    starts = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with Gateway(ScriptedBackend(lambda request: turn(""))):
            starts.append(time.perf_counter() - began)
    figures["start_seconds"] = sorted(starts)
    with Gateway(ScriptedBackend(lambda request: turn("Hello."))) as gateway:
        for name, (path, body) in BODIES.items():
            for num_agents in (1, NUM_AGENTS):
                wall, cpu = [], []
                for _ in range(ROUNDS):
                    began, used = time.perf_counter(), time.process_time()
                    asyncio.run(play(gateway, path, body, num_agents=num_agents))
                    num = num_agents * NUM_TURNS
                    wall.append(1000 * (time.perf_counter() - began) / num)
                    cpu.append(1000 * (time.process_time() - used) / num)
                figures[f"{name}, {num_agents} agents"] = {
                    "wall_ms_per_turn": round(statistics.median(wall), 2),
                    "cpu_ms_per_turn": round(statistics.median(cpu), 2),
                    "wall_ms_of_rounds": [round(value, 2) for value in sorted(wall)],
                }
    print(figures)
    write_json(ROOT / "artifacts" / "bench" / "gateway.json", figures)
    assert statistics.median(starts) < 0.5
