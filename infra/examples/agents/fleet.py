"""The function of `environment.settings.object` that hands each episode to one program that stays.

Copy it into tasks/custom: `object: tasks.custom.fleet:play`. FLEET names the program, a path each.
"""

import asyncio
import dataclasses
import itertools
import json
import os
import subprocess
import threading
from concurrent.futures import Future
from typing import Any

from tasks.tools.driven import AgentTask, Endpoint


class Fleet:
    """One program: a line to it begins an episode, a line from it ends one."""

    def __init__(self, command: list[str]):
        self.program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ends: dict[int, Future[str]] = {}
        self.has_ended = False
        self.numbers, self.lock = itertools.count(), threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, task: AgentTask, endpoint: Endpoint) -> Future[str]:
        """RuntimeError or OSError where the program has ended."""
        number, end = next(self.numbers), Future[str]()
        episode = {"number": number, "request": task.requests[0], **dataclasses.asdict(endpoint)}
        with self.lock:
            if self.has_ended:
                raise RuntimeError("the fleet's program ended")
            self.ends[number] = end
            assert self.program.stdin is not None
            self.program.stdin.write(json.dumps(episode) + "\n")
            self.program.stdin.flush()
        return end

    def _listen(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            said = end_of(line)
            end = self.ends.pop(said.get("number", -1), None)
            if end is None or not end.set_running_or_notify_cancel():
                continue
            if "answer" in said:
                end.set_result(said["answer"])
            else:
                end.set_exception(RuntimeError(said.get("error")))
        with self.lock:
            self.has_ended = True
        for end in self.ends.values():
            if end.set_running_or_notify_cancel():
                end.set_exception(RuntimeError("the fleet's program ended"))


def end_of(line: str) -> dict[str, Any]:
    """What a line says about an end: nothing, where a framework printed it."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and isinstance(said.get("number"), int) else {}


fleets: list[Fleet] = []  # the last is the one that plays
starting = threading.Lock()


def fleet() -> Fleet:
    """Started anew where its program has ended."""
    with starting:
        if not fleets or fleets[-1].has_ended:
            fleets.append(Fleet(os.environ["FLEET"].split()))
        return fleets[-1]


async def play(task: AgentTask, endpoint: Endpoint) -> str:
    return await asyncio.wrap_future(fleet().begin(task, endpoint))
