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
from functools import cache
from typing import Any

from tasks.core.records import Problem
from tasks.tools.driven import Endpoint


class Fleet:
    """One program: a line to it begins an episode, a line from it ends one."""

    def __init__(self, command: list[str]):
        self.program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ends: dict[int, Future[str]] = {}
        self.numbers, self.lock = itertools.count(), threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, problem: Problem, endpoint: Endpoint) -> Future[str]:
        number, end = next(self.numbers), Future[str]()
        self.ends[number] = end
        episode = {"number": number, "request": problem.requests[0], **dataclasses.asdict(endpoint)}
        with self.lock:
            assert self.program.stdin is not None
            self.program.stdin.write(json.dumps(episode) + "\n")
            self.program.stdin.flush()
        return end

    def _listen(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            said: dict[str, Any] = json.loads(line)
            end = self.ends.pop(said["number"])
            if not end.set_running_or_notify_cancel():
                continue
            if "error" in said:
                end.set_exception(RuntimeError(said["error"]))
            else:
                end.set_result(said["answer"])
        for end in self.ends.values():
            end.set_exception(RuntimeError("the fleet's program ended"))


@cache
def fleet() -> Fleet:
    return Fleet(os.environ["FLEET"].split())


async def play(problem: Problem, endpoint: Endpoint) -> str:
    return await asyncio.wrap_future(fleet().begin(problem, endpoint))
