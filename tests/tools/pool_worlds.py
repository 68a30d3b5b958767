"""A world whose tools die, hang and leak, for the pool's workers, which import it by name."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tasks.core.records import Problem, ReferenceTurn
from tasks.core.settings import Settings
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Environment, Verdict
from tasks.tools.pool.environment import PooledEnvironment
from tasks.tools.settings import PoolSettings
from tests.worlds import QUICK

MAKE = f"{__name__}:make"
ONCE = "once"  # of a problem's world: the file that says it has happened


def refuse() -> None:
    raise ValueError("no such row")


def recurse() -> None:
    recurse()


def lose() -> None:
    raise ConnectionResetError("the database is away")


WAYS_OUT: dict[str, Callable[[], None]] = {
    "exit": sys.exit, "ValueError": refuse, "RecursionError": recurse, "lost connection": lose,
}  # fmt: skip


class Where(Settings):
    timeout_seconds: float = 120.0


class TroubleEpisode(ToolEpisode):
    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.notes: list[str] = []
        self._leave("start")

    @tool("Write a word down; says which words there are.")
    def note(self, word: str) -> list[str]:
        self.notes.append(word)
        return self.notes

    @tool("The worker's process id.")
    def pid(self) -> int:
        return os.getpid()

    @tool("Answer a little later.")
    async def wait(self) -> str:
        await asyncio.sleep(0.01)
        return "waited"

    @tool("Die, the first time in this problem.")
    def die(self) -> str:
        if self._is_first():
            os._exit(9)
        return "alive"

    @tool("Hang for ever, the first time.")
    def hang(self) -> str:
        while self._is_first(keep=True):
            time.sleep(0.01)
        return "back"

    @tool("Wait a little, then hang where others wait.")
    async def choke(self) -> str:
        await asyncio.sleep(0.01)
        time.sleep(3600)
        return "back"

    @tool("Start a process that keeps the connection open, then die.", blocking=True)
    def die_with_a_child(self) -> str:
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(9)

    @tool("Take memory without end, the first time.")
    def leak(self) -> int:
        held: list[bytearray] = []
        while self._is_first(keep=True):
            held.append(bytearray(64 << 20))
        return len(held)

    def _is_first(self, *, keep: bool = False) -> bool:
        """`keep`: all through the first play, as the file has that worker's number."""
        file = Path(self.problem.world[ONCE])
        try:
            with file.open("x", encoding="utf-8") as stream:  # of two workers at once only one is the first
                stream.write(str(os.getpid()))
        except FileExistsError:
            return keep and file.read_text(encoding="utf-8") == str(os.getpid())
        return True

    @tool("Leave, if the problem says so.")
    def leave(self) -> str:
        self._leave("call")
        return "stayed"

    def end_turn(self, message: str | None) -> None:
        self._leave("end_turn")

    def _leave(self, step: str) -> None:
        """In the way of the problem, at the step that it names."""
        if self.problem.world.get("leaves_at") == step:
            WAYS_OUT[self.problem.category]()

    def verdict(self, final_message: str | None) -> Verdict:
        self._leave("verdict")
        return Verdict(final_message == "Done.", details={"notes": self.notes})


class Trouble(ToolEnvironment):
    name, episode_class = "trouble", TroubleEpisode


def make(section: dict[str, Any]) -> Environment:
    return Trouble(QUICK.model_copy(update=section))


def pooled(num_workers: int, *, max_restarts: int = 0, timeout_seconds: float = 120.0) -> PooledEnvironment:
    settings = Where(timeout_seconds=timeout_seconds)
    pool = PoolSettings(num_workers=num_workers, max_restarts=max_restarts, memory_gib=1)
    return PooledEnvironment(make(settings.model_dump()), settings, pool, make=MAKE)


def problem(folder: Path, number: int = 0) -> Problem:
    return Problem(
        id=f"p{number}", category="c", level=1, requests=["Go."], world={ONCE: str(folder / f"once{number}")},
        reference=[ReferenceTurn(calls=[], answer="Done.")], split_group="g",
    )  # fmt: skip


def problems(folder: Path, count: int) -> Iterable[Problem]:
    return [problem(folder, number) for number in range(count)]
