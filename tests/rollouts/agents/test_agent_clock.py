"""An agent's time stands still while the endpoint owes it something, and runs otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tasks.chat.format import ChatFormat
from tasks.gateway.completions import CompletionRequest, ProtocolError
from tasks.rollouts.agents.inbox import MOST_WAITING, Inbox
from tasks.rollouts.agents.kind import AgentEpisodes
from tasks.tools.driven import AgentClock
from tests import tiny
from tests.rollouts.agents.conftest import Imitator


def stands_still(clock: AgentClock) -> bool:
    """`left` is the same number again and again only while it is held."""
    return len({clock.left for _ in range(1000)}) == 1


def test_the_clock_is_held_for_turns_and_calls_and_runs_on_after_the_last_and_after_a_429(chat: ChatFormat):
    kind, clock, inbox = AgentEpisodes(Imitator(chat, {}), chat, tiny.ROOMY), AgentClock(3600), Inbox()
    run: Any = SimpleNamespace(inbox=inbox, episode=SimpleNamespace(clock=clock))
    kind.by_key["key"] = run
    request = CompletionRequest("policy", [])
    called = kind.call("key", "search", {})
    assert stands_still(clock)
    called.cancel()
    assert not stands_still(clock)
    for _ in range(MOST_WAITING - 1):
        kind.complete("key", request)
    for ask in (lambda: kind.complete("key", request), lambda: kind.call("key", "search", {})):
        with pytest.raises(ProtocolError, match="wait already"):
            ask()
    assert stands_still(clock)
    inbox.close()
    assert not stands_still(clock)
