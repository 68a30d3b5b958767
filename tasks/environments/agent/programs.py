"""One agent as a program or as an async function: started, heard, and ended whole.

A program has its own process group (`core/child_processes.py`), a folder that is removed after it, and these variables
beside a minimal environment: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, TURNWISE_MODEL,
TURNWISE_PROBLEM (a JSON file), TURNWISE_MCP_URL and TURNWISE_RESULT (the file that it may write). Of what it prints the
last 16 kB are kept, for the message about its end.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tasks.core import json_text
from tasks.core.files import write_json
from tasks.core.heard_process import HeardProcess
from tasks.core.secrets import Secrets
from tasks.core.text import encodable, one_line
from tasks.core.user_code import users_line
from tasks.tools.base import EnvironmentFault
from tasks.tools.driven import AgentTask, Endpoint
from tasks.tools.server_settings import inherited_variables

MAX_RESULT_BYTES = 1 << 20
LAST_WORDS_SECONDS = 5.0  # to read what it printed, once all that may print has ended
Result = dict[str, Any]  # what an agent says at its end: `success`, `answer`, `details`, each where it says it
AgentFunction = Callable[[AgentTask, Endpoint], Coroutine[Any, Any, Any]]


class Agent(Protocol):
    ended: Future[Result]  # EnvironmentFault if it crashed

    def stop(self) -> None:
        """Returns when it is gone, or is no more of ours; may be called again."""
        ...


class Program:
    def __init__(self, command: Sequence[str], variables: Mapping[str, str], task: AgentTask, endpoint: Endpoint):
        self.ended: Future[Result] = Future()
        self.folder = Path(tempfile.mkdtemp(prefix="turnwise-agent-"))
        self.result_file = self.folder / "result.json"
        self.secrets = Secrets([*variables.values(), endpoint.key])
        problem_file = self.folder / "problem.json"
        told = {
            "OPENAI_BASE_URL": endpoint.openai_url,
            "OPENAI_API_KEY": endpoint.key,
            "ANTHROPIC_BASE_URL": endpoint.anthropic_url,
            "ANTHROPIC_API_KEY": endpoint.key,
            "TURNWISE_MODEL": endpoint.model,
            "TURNWISE_MCP_URL": endpoint.mcp_url,
            "TURNWISE_PROBLEM": str(problem_file),
            "TURNWISE_RESULT": str(self.result_file),
        }
        try:
            write_json(problem_file, task.model_dump(mode="json"))
            self.child = HeardProcess(command, env={**inherited_variables(), **variables, **told}, folder=self.folder)
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise EnvironmentFault(f"{command[0]!r} could not be started: {error.strerror}", tool="agent") from None
        threading.Thread(target=self._wait, name="agent", daemon=True).start()

    def stop(self) -> None:
        self.child.stop()

    def _wait(self) -> None:
        try:
            status = self.child.wait()
            result = self._read_result() if status == 0 else {}
            self.child.stop()  # what it started, too
            if status != 0:
                raise EnvironmentFault(f"the agent {self.child.how_it_ended()}{self._last_line()}", tool="agent")
            self.ended.set_result(result)
        except EnvironmentFault as fault:
            self.child.stop()
            self.ended.set_exception(fault)
        except Exception as error:  # of reading what it left: without an end its episode waits for the deadline
            self.child.stop()
            told = f"its end could not be read: {type(error).__name__}: {one_line(error)}"
            self.ended.set_exception(EnvironmentFault(told, tool="agent"))

    def _last_line(self) -> str:
        lines = self.child.last_words(1, wait_seconds=LAST_WORDS_SECONDS)
        return f": {one_line(self.secrets.hide(lines[-1]))}" if lines else ", and printed nothing"

    def _read_result(self) -> Result:
        if not self.result_file.is_file():
            return {}
        if self.result_file.stat().st_size > MAX_RESULT_BYTES:
            raise EnvironmentFault(f"its result file has more than {MAX_RESULT_BYTES:,} bytes", tool="agent")
        try:
            return checked_result(json_text.parse(self.result_file.read_bytes()))
        except ValueError as error:
            raise EnvironmentFault(f"its result file is not JSON: {one_line(error)}", tool="agent") from None


class Function:
    """It runs in a thread with an event loop of its own. One that blocks cannot be ended, and is left behind."""

    def __init__(self, function: AgentFunction, task: AgentTask, endpoint: Endpoint):
        self.ended: Future[Result] = Future()
        self.loop = asyncio.new_event_loop()
        self.task = self.loop.create_task(function(task, endpoint))
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    def stop(self) -> None:
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.task.cancel)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                said = runner.get_loop().run_until_complete(self.task)
            self.ended.set_result(checked_result({"answer": said} if isinstance(said, str) else _as_json(said or {})))
        except EnvironmentFault as fault:
            self.ended.set_exception(fault)
        except BaseException as error:
            line = users_line(error)
            told = f"the agent raised {type(error).__name__}: {one_line(error)}{f' at {line}' if line else ''}"
            self.ended.set_exception(EnvironmentFault(told, tool="agent"))


def _as_json(said: Any) -> Any:
    """As a file would have it: trajectories are written with it. EnvironmentFault where no file can contain it."""
    try:
        return json_text.parse(json_text.json_line(said))
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFault(f"its result is not JSON: {one_line(error)}", tool="agent") from None


def checked_result(said: Any) -> Result:
    """As a trajectory can contain it: half a surrogate pair, as JavaScript's slice leaves of an emoji, becomes U+FFFD.
    EnvironmentFault where a result says something in another shape than it has.
    """
    shapes = {"success": bool, "answer": str, "details": dict}
    if not isinstance(said, dict) or any(name in said and not isinstance(said[name], shapes[name]) for name in shapes):
        raise EnvironmentFault(
            f"its result is {said!r:.100}, and must be an object: success true or false, answer a text, details an "
            f"object, each where it says it",
            tool="agent",
        )
    result: Result = json_text.parse(encodable(json_text.json_line(said)))
    return result
