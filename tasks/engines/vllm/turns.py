"""Ask vLLM servers until they answer: a turn, or the log-probs of given tokens.

A turn lost with its server is repeated with the same ids and seed, so the episode does not change. Runs on the event
loop of `servers.py`.
"""

from __future__ import annotations

import asyncio
import time

from tasks.engines.vllm.client import Answer, ConnectionLost
from tasks.engines.vllm.server import Server, Weights
from tasks.engines.vllm.server_process import ServerDown
from tasks.engines.vllm.servers import Servers
from tasks.models.differences import Differences, Tolerance
from tasks.rollouts.engine import TurnReply, TurnRequest

MAX_LOST_CONNECTIONS = 3  # of one turn in a row, to a server that reports good health


async def ask_turn(servers: Servers, request: TurnRequest, prompt: list[int]) -> TurnReply:
    num_lost = 0
    while True:
        server = await servers.place(request.episode)
        weights, incarnation = server.weights, server.incarnation
        assert weights is not None
        try:
            answer = await _ask(server, weights, request, prompt)
            servers.num_prompt_tokens += answer.num_prompt_tokens
            servers.num_cached_tokens += answer.num_cached_tokens
            versions = [weights.policy_version] * len(answer.token_ids)
            return TurnReply(request.episode, answer.token_ids, answer.sampler_logp, answer.finish, versions)
        except ServerDown as down:
            servers.num_retried_turns += 1
            server.num_lost_turns += 1
            servers.record(
                "turn_retried",
                episode=request.episode,
                seed=request.seed,
                server=server.number,
                reason=str(down),
            )
            num_lost += 1
            is_blip = isinstance(down, ConnectionLost) and num_lost < MAX_LOST_CONNECTIONS
            if incarnation == server.incarnation and not (is_blip and await server.is_up()):
                await servers.fail(server, incarnation, down)


async def _ask(server: Server, weights: Weights, request: TurnRequest, prompt: list[int]) -> Answer:
    """The label salts the prefix cache: a cache that survived a refresh is never used for other weights."""
    server.num_in_flight += 1
    try:
        answer = await server.client.generate(
            prompt,
            max_new_tokens=request.max_new_tokens,
            seed=request.seed,
            cache_salt=weights.label,
            more_end_ids=request.end_ids,
        )
    finally:
        server.num_in_flight -= 1
    server.last_answer = time.monotonic()
    return answer


async def score_on_all(servers: Servers, sequences: list[list[int]], *, tolerance: Tolerance) -> list[list[float]]:
    """Log-probs on which all servers agree within `tolerance`; they load the weights again once, then ValueError."""
    is_redone = False
    while True:
        found = [await _score(servers, server, sequences) for server in await servers.ready()]
        scored = [logps for logps in found if logps is not None]
        if not scored:
            continue
        apart = [gap for other in scored if not (gap := _differences(scored[0], other)).is_within(tolerance)]
        if not apart:
            return scored[0]
        if is_redone or servers.weights is None or servers.weights.label is None:
            raise ValueError(
                f"the vLLM servers' log-probs differ by {apart[0]} (nats), more than engine.probe_tolerance allows "
                f"({tolerance}), so they do not serve the same weights. Start those "
                f"in engine.settings.urls on one model, of one dtype."
            )
        await servers.serve_again()
        is_redone = True


async def _score(servers: Servers, server: Server, sequences: list[list[int]]) -> list[list[float]] | None:
    incarnation = server.incarnation
    try:
        return list(await asyncio.gather(*map(server.client.token_logp, sequences)))
    except ServerDown as down:
        await servers.fail(server, incarnation, down)
        return None


def _differences(some: list[list[float]], others: list[list[float]]) -> Differences:
    pairs = ((a, b) for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=True))
    return Differences.of(a - b for a, b in pairs)
