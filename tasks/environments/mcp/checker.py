"""Success by a function of the user's: `tasks.custom.module:function`, called when an episode is over.

    def judge(problem, calls, final_message, call_tool) -> bool | dict[str, bool]

`calls`: the answered calls in order, as {"name", "arguments", "reply"}. `final_message`: None if the episode ended on a
limit. `call_tool(name, arguments)`: calls any tool of the server and returns the text, of a list one JSON array. It
raises `tasks.tools.layer.ToolError` if the tool refuses, for checkers that expect that. A dict contains named checks;
all must be True. The function is trusted, runs in a thread and may block. If it raises or returns anything else, that
is an environment fault, not a failure of the model.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.load_object import load_object
from tasks.core.records import Problem
from tasks.core.text import one_line
from tasks.tools.base import EnvironmentFault, Verdict
from tasks.tools.checks import read_verdict
from tasks.tools.layer import ToolError

REFUSED = "(in a call by the checker; one that expects it catches ToolError of tasks.tools.layer)"
MAX_REPLY = 120  # characters of a reply in the message of a crash

CallTool = Callable[[str, Mapping[str, Any]], str]
Checker = Callable[[Problem, Sequence[Mapping[str, Any]], str | None, CallTool], Any]


def load_checker(path: str) -> Checker:
    """The function at an import path in tasks/custom. ValueError if there is none."""
    try:
        found = load_object(path)
    except ValueError as error:
        raise ValueError(f"environment.settings.checker: {error}. Without it no episode could be judged.") from None
    if not callable(found) or inspect.iscoroutinefunction(found):
        name = path.rpartition(":")[2]
        raise ValueError(
            f"environment.settings.checker: {path} is not a plain function, so no episode could be judged. Define it "
            f"as {name}(problem, calls, final_message, call_tool)."
        )
    return found


def describe_checker(path: str, checker: Checker) -> dict[str, Any]:
    try:
        source = Path(inspect.getsourcefile(inspect.unwrap(checker)) or "").read_bytes()
    except (OSError, TypeError):  # generated or compiled code
        return {"checker": path, "source": None}
    return {"checker": path, "source": hashlib.sha256(source).hexdigest()}


def run_checker(
    checker: Checker,
    problem: Problem,
    calls: Sequence[Mapping[str, Any]],
    final_message: str | None,
    call_tool: CallTool,
) -> Verdict:
    """The checker's verdict. EnvironmentFault if it failed, or a tool it called did, even if it hid that; of a tool
    that refused, if it did not catch the ToolError.
    """
    faults: list[EnvironmentFault] = []
    asked, replied = "", ""

    def call_and_note(name: str, arguments: Mapping[str, Any]) -> str:
        nonlocal asked, replied
        asked, replied = name, ""
        try:
            replied = call_tool(name, arguments)
        except EnvironmentFault as fault:
            faults.append(fault)
            raise
        return replied

    try:
        said = checker(problem, calls, final_message, call_and_note)
    except EnvironmentFault:
        raise
    except Exception as error:
        if faults:
            raise faults[0] from None
        if isinstance(error, ToolError):
            raise EnvironmentFault(f"{one_line(error.message)} {REFUSED}", tool=asked) from None
        after = f"; call_tool({asked!r}) last answered {one_line(repr(replied), MAX_REPLY)}" if asked else ""
        told = f"problem {problem.id!r}: it raised {type(error).__name__}: {one_line(error)}{after}"
        raise EnvironmentFault(told, tool="checker") from error
    if faults:
        raise faults[0]
    return read_verdict(said)
