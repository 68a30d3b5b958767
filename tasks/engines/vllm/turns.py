"""Ask vLLM servers until they answer: a turn, or the log-probs of given tokens.

A turn lost with its server is repeated with the same ids and seed, so the episode does not change. One that a refresh
cuts short goes on with the new weights. Runs on the event loop of `servers.py`.
"""

from __future__ import annotations

import asyncio

from tasks.chat.format import ChatFormat
from tasks.engines.vllm.answers import Answer
from tasks.engines.vllm.client import ConnectionLost
from tasks.engines.vllm.partial_turn import PartialTurn
from tasks.engines.vllm.server import Server, Weights
from tasks.engines.vllm.server_process import ServerDown
from tasks.engines.vllm.servers import Servers
from tasks.models.differences import Differences, Tolerance
from tasks.rollouts.engine import TurnReply, TurnRequest

MAX_LOST_CONNECTIONS = 3  # of one turn in a row, to a server that reports good health


async def ask_turn(servers: Servers, request: TurnRequest, prompt: list[int], chat: ChatFormat) -> TurnReply:
    """One that new weights come into goes on with them, and keeps its tokens."""
    turn, num_lost = PartialTurn(request), 0
    while True:
        server = await servers.place(request.episode)
        weights, incarnation = server.weights, server.incarnation
        assert weights is not None
        try:
            answer = await _ask(server, weights, turn, prompt)
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
            continue
        servers.num_prompt_tokens += answer.num_prompt_tokens
        servers.num_cached_tokens += answer.num_cached_tokens
        stops = server.client.sampling.stop_strings
        piece = answer.token_ids, answer.sampler_logp, weights.policy_version, answer.finish
        if (reply := turn.add(*piece, stop_strings=stops, chat=chat)) is not None:
            return reply
        servers.num_continued_turns += 1


async def _ask(server: Server, weights: Weights, turn: PartialTurn, prompt: list[int]) -> Answer:
    """The label salts the prefix cache: a cache that survived a refresh is never used for other weights.

    A turn is cut short by our pause alone: a server that ends its turns because it is shut down has lost them. The turn
    is under way until its answer is known to be by `weights`, so that no new ones are loaded.
    """
    server.num_in_flight += 1
    try:
        call = server.client.generate(
            [*prompt, *turn.token_ids],
            max_new_tokens=turn.num_left,
            seed=turn.seed,
            cache_salt=weights.label,
            more_end_ids=turn.request.end_ids,
        )
        answer = await server.answer(call)
        if answer.finish is None and not server.is_ending_turns:
            raise ServerDown("it ended a turn that it was not asked to end")
        await server.take_answer(weights)
    finally:
        server.num_in_flight -= 1
    return answer


async def score_on_all(servers: Servers, sequences: list[list[int]], *, tolerance: Tolerance) -> list[list[float]]:
    """Log-probs on which all servers agree within `tolerance`; they load the weights again once, then ValueError."""
    is_redone = False
    while True:
        found = [(server, await _score(servers, server, sequences)) for server in await servers.ready()]
        scored = [(server, logps) for server, logps in found if logps is not None]
        if not scored:
            continue
        (first, logps), *others = scored
        apart = {
            server: gap for server, other in others if not (gap := _differences(logps, other)).is_within(tolerance)
        }
        if not apart:
            return logps
        if is_redone or servers.weights is None or servers.weights.label is None:
            raise ValueError(
                f"vLLM {first} and {', '.join(map(str, apart))} do not serve the same weights: their log-probs differ "
                f"by {next(iter(apart.values()))} (nats), and engine.probe_tolerance allows {tolerance}. Start those "
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
