"""The queue before the engine: who waits in it, and whom it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tasks.commands.serve.loop import EngineLoop
from tasks.gateway.completions import CompletionRequest, ProtocolError
from tests import tiny
from tests.commands.serve.clients import until, user


class Busy:
    """An engine whose turns end with `let_go`."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def poll(self, until: Callable[[], bool]) -> list[Any]:
        if not self.let_go.wait(0.01):
            return []
        raise RuntimeError("ended")

    def close(self) -> None:
        pass


def test_who_hung_up_while_all_slots_are_busy_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch):
    engine, turns = Busy(), SimpleNamespace(begin=lambda request: object(), release_all=lambda: None)
    monkeypatch.setattr(EngineLoop, "_conversations_of", lambda self, served: turns)
    served = cast(Any, SimpleNamespace(engine=engine, version="v"))
    loop = EngineLoop(served, tiny.SAMPLING, name="m", max_under_way=1, max_waiting=2)
    loop.start()

    def ask() -> Any:
        return loop.complete("", CompletionRequest("m", [user("hello")]))

    ask()
    until(lambda: loop.counts()["under_way"] == 1)
    gone, next_gone = ask(), ask()
    with pytest.raises(ProtocolError, match="2 requests wait"):
        ask()
    gone.cancel()
    ask()
    with pytest.raises(ProtocolError, match="2 requests wait"):
        ask()
    next_gone.cancel()
    assert loop.counts()["waiting"] == 1
    engine.let_go.set()
    loop.end()
