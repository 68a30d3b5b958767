"""Episodes that a checkpoint has under way are answered afresh, side by side."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from tasks.chat.format import ChatFormat
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.travel_desk.environment import TravelDesk, TravelDeskEpisode
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EngineEpisodes, EpisodeKey
from tasks.rollouts.under_way import restore, suspend
from tasks.tools.base import EnvironmentFault
from tests import tiny

SAMPLING = tiny.ROOMY
PROBLEMS = {problem.id: problem for problem in tiny.problems(4)}
SAME, ALSO_SAME, OTHER, DOWN = PROBLEMS


class TogetherEpisode(TravelDeskEpisode):
    """No tool answers before all four were asked. Then one says something else than before, and one is down."""

    asked: ClassVar[list[tuple[str, Any, Future[Any]]]] = []

    def malformed_call(self) -> Any:
        waiting: Future[Any] = Future()
        self.asked.append((self.problem.id, super().malformed_call(), waiting))
        if len(self.asked) >= len(PROBLEMS):
            for name, reply, future in self.asked:
                if not future.done() and name == DOWN:
                    future.set_exception(EnvironmentFault("is down", tool="desk"))
                elif not future.done():
                    future.set_result(replace(reply, text="Other.") if name == OTHER else reply)
        return waiting


def collector(chat: ChatFormat, world: TravelDesk) -> Collector:
    malformed = chat.encode("<tool_call>\n{oops\n</tool_call>")
    engine = ScriptedEngine([[malformed] * 9], end_of_turn=chat.end_of_turn)
    kind: Any = EngineEpisodes(engine, chat, SAMPLING)
    found = Collector(kind, world, max_concurrent_episodes=9, seed=0, stage="test")
    found.begin()
    return found


def test_tools_answer_side_by_side_and_a_fault_is_told_apart_from_another_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of four episodes of two turns or more, two go on; two are played from their start with the same key."""
    chat = ChatFormat(tiny.tokenizer(), source="test")
    stopped = collector(chat, TravelDesk())
    stopped.add([EpisodeKey(problem, 1, 0) for problem in PROBLEMS.values()])
    stopped.step()
    rows = suspend(stopped)
    assert [len(row["replies"]) for row in rows["running"]] == [2] * 4
    world = TravelDesk()
    world.episode_class = TogetherEpisode  # type: ignore[misc]
    going_on = collector(chat, world)
    thread = threading.Thread(target=restore, args=(going_on, rows, PROBLEMS), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [run.key.problem.id for run in going_on.running] == [SAME, ALSO_SAME]
    assert going_on.ready == list(going_on.running)
    assert [(number, key.problem.id, attempt) for number, key, attempt in going_on.waiting] == [
        (2, OTHER, 0),
        (3, DOWN, 0),
    ]
    assert dict(going_on.faults.restarts) == {"desk: unavailable: is down": 1}
    told = " ".join("".join(capsys.readouterr()).split())
    assert "test: going on with 4 episodes under way" in told
    assert "1 of 4 episodes that were under way got other answers from their tools" in told
    assert "1 of 4 episodes that were under way met a fault of the environment" in told
    stopped.close_running()
    going_on.close_running()
