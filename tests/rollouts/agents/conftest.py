"""The same world by our own loop and by agents: a policy that plays references with a tiny model's log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.core.records import Problem
from tasks.core.tool_calls import call_text
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.catalog import load_environment
from tasks.rollouts.collect import Collector
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.engine import EpisodeHandle, Finish, TurnReply, TurnRequest, never
from tasks.rollouts.kinds import kind_of
from tasks.rollouts.settings import SamplingSettings
from tasks.tools.base import Environment
from tests import tiny
from tests.worlds import as_custom, environment_settings

AGENTS = as_custom("tests.rollouts.agents.scripted_agents")
VERDICT = {"by": "result", "checker": None, "url": None, "timeout_seconds": 60}


def agent_settings(**changed: Any) -> dict[str, Any]:
    """Of an agent in travel_desk; `changed` replaces parts."""
    return {
        "command": None,
        "object": f"{AGENTS}:play",
        "environment": {},
        "models": ["policy"],
        "deadline_seconds": 120.0,  # of a busy machine
        "world": {"name": "travel_desk", "settings": None},
        "verdict": None,
        **changed,
    }


def agent_world(**changed: Any) -> Environment:
    return load_environment(environment_settings("agent", settings=agent_settings(**changed)))


class Imitator(ScriptedEngine):
    """Writes what `texts` has for the problem that a prompt asks about, turn by turn, whichever sequence asks. Its
    log-probs are a function of all ids before, as a model's are.
    """

    def __init__(self, chat: ChatFormat, texts: dict[str, Sequence[str]]):
        super().__init__([], end_of_turn=chat.end_of_turn)
        self.chat, self.texts = chat, texts
        self.held: dict[EpisodeHandle, list[int]] = {}
        self.num_written: dict[EpisodeHandle, int] = {}
        self.num_at_once = 0

    def submit(self, request: TurnRequest) -> None:
        self.held.setdefault(request.episode, []).extend(request.token_ids)
        self.requests.append(request)

    def poll(self, until: Any = never) -> list[TurnReply]:
        self.num_at_once = max(self.num_at_once, len(self.requests))
        return super().poll(until)

    def release(self, episode: EpisodeHandle) -> None:
        del self.held[episode]

    def _write(self, request: TurnRequest) -> TurnReply:
        held = self.held[request.episode]
        text = self.chat.decode(held)
        known = [pair for pair in self.texts.items() if pair[0] in text] or [("", ["Yes."])]
        asked, turns = max(known, key=lambda pair: text.rfind(pair[0]))
        number = text[text.rfind(asked) :].count("assistant\n") - 1
        token_ids = [*self.chat.encode(turns[number % len(turns)]), self.end_of_turn][: request.max_new_tokens]
        logp = [-((sum(held) + place) % 97) / 97 for place in range(len(token_ids))]
        held += token_ids
        finish: Finish = "end_of_turn" if token_ids[-1] == self.end_of_turn else "length"
        return TurnReply(request.episode, token_ids, logp, finish, [self.policy_version] * len(token_ids))


def reference_texts(problem: Problem) -> list[str]:
    turn = problem.reference[0]
    return [*map(call_text, turn.calls), turn.answer]


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    return ChatFormat(tiny.tokenizer(), source="test")


def collect(
    environment: Environment,
    engine: Any,
    chat: ChatFormat,
    problems: Sequence[Problem],
    *,
    sampling: SamplingSettings = tiny.ROOMY,
    at_once: int = 16,
    stage: str = "test",
) -> list[Any]:
    with kind_of(environment, engine, chat, sampling) as kind:
        collector = Collector(kind, environment, max_concurrent_episodes=at_once, seed=0, stage=stage)
        played = collector.collect([EpisodeKey(problem, 0, 0) for problem in problems])
    environment.close()
    return played
