"""Which kind of episodes an environment has: our own loop, or an agent that drives itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from tasks.chat.format import ChatFormat
from tasks.rollouts.engine import Engine
from tasks.rollouts.episode import EngineEpisodes
from tasks.rollouts.settings import SamplingSettings
from tasks.tools.base import Environment


@contextmanager
def kind_of(
    environment: Environment, engine: Engine, chat: ChatFormat, sampling: SamplingSettings
) -> Iterator[EngineEpisodes]:
    if not environment.is_driven_by_agent():
        yield EngineEpisodes(engine, chat, sampling)
        return
    from tasks.rollouts.agents.kind import AgentEpisodes

    with closing(AgentEpisodes(engine, chat, sampling)) as episodes:
        yield episodes
