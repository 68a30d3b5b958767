"""Failures that no row is to blame for: code that crashes, a judge, checker or server that fails, a tool that refuses
whatever it is asked. They end curation with a remedy of their own, the same one in each of the first episodes at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from tasks.core.terminal import warn
from tasks.core.text import first_few, one_line
from tasks.core.user_code import users_line
from tasks.tools.base import Environment, EnvironmentFault
from tasks.tools.layer import OURS
from tasks.tools.mcp_content import OF_HIDDEN_ERRORS, hides_error
from tasks.tools.replay import Played, Script, play

MALFORMED = ("invalid_arguments", "unknown_tool")  # a call that the environment refuses may be part of a solution
MEANT = (*MALFORMED, *OURS)  # in a solution: a wrong call on purpose, an outage that the world scripts
NUM_ALONE = 3  # solutions that failed beside others and are played again
MAX_REPLY = 120  # characters of what a tool said
AFRESH = (
    "Its episodes do not start afresh (reset: none of an MCP server), so a reference meets what another episode left: "
    "set environment.settings.reset to process, scratch or tool."
)
REMEDIES = {
    "judge": "See that its endpoint answers (environment.judge: url, model, timeout_seconds), then curate again.",
    "verdict": "See that environment.settings.verdict.url answers, then curate again.",
    "checker": "Correct the checker: it returns True, False, or a dict of named checks that are True or False.",
    "server": "See that the server runs and what it logs, then curate again.",
}
OF_A_TOOL = "See that the tool answers, and whatever it asks itself, then curate again."


class Failure(NamedTuple):
    """`same`: equal for failures of one cause. A message is `what` in which episodes, and `how`."""

    same: Hashable
    what: str
    how: str
    remedy: str

    def tell(self, where: str) -> str:
        return f"{self.what} in {where}{self.how}"


def refuse_equal_failures(
    environment: Environment, scripts: Sequence[Script], played: Sequence[Played], label: str
) -> None:
    """ValueError where each failed alike: the others would too, after long retries."""
    found = [_failure_of(environment, script, item) for script, item in zip(scripts, played, strict=True)]
    first = found[0]
    if first is None or any(failure is None or failure.same != first.same for failure in found):
        return
    refuse_disturbed(environment, scripts, played, label)
    told = first.tell(f"each of the first {len(played)} {label}")
    raise ValueError(f"{told}, so the others were not played. {first.remedy} No problem was curated.")


def refuse_failures_outside(scripts: Sequence[Script], played: Sequence[Played], label: str) -> None:
    """ValueError where whoever is asked beside a row, or for it, gave no answer in some of those played so far."""
    pairs = zip(scripts, played, strict=False)
    failed = [(script, item.error) for script, item in pairs if isinstance(item.error, EnvironmentFault)]
    outside = [(script, fault) for script, fault in failed if fault.__cause__ is None]
    if outside:
        script, fault = outside[0]
        failure = _failure_outside(fault)
        so_far = "the first " if len(played) < len(scripts) else ""
        where = f"{len(outside):,} of {so_far}{len(played):,} {label}, first in {one_line(repr(script.problem.id))}"
        raise ValueError(f"{failure.tell(where)}. {failure.remedy} No problem was curated.")


def refuse_disturbed(environment: Environment, scripts: Sequence[Script], played: Sequence[Played], label: str) -> None:
    """ValueError where a solution that failed beside others succeeds alone; a few are played again."""
    judged = [script for script, item in zip(scripts, played, strict=True) if item.verdict and not item.verdict.success]
    failed = [script for script in judged if environment.knows_solution(script.problem)]
    alone = [script for script in failed[:NUM_ALONE] if is_solved(play(environment, [script])[0])]
    if alone:
        raise ValueError(
            f"{len(failed):,} of {len(played):,} {label} fail, and {len(alone)} of {len(failed[:NUM_ALONE])} played "
            f"again alone succeed, first {one_line(repr(alone[0].problem.id))}: episodes side by side disturb each "
            f"other, or chance decides. Keep the state by episode (a server: by session), or set "
            f"environment.settings.max_servers: 1 where the environment has it. No problem was curated."
        )


def is_solved(played: Played) -> bool:
    return played.verdict is not None and played.verdict.success


def refusing_tools(scripts: Sequence[Script], played: Sequence[Played]) -> dict[str, str]:
    """What each tool said that refused all of its calls in the same words. Words that differ are of the calls: the
    references may show how an agent gets over them.
    """
    said, answering = defaultdict[str, list[str]](list), set[str]()
    for script, item in zip(scripts, played, strict=True):
        for call, reply in zip(script.calls, item.replies, strict=False):
            if call and reply.error is None:
                answering.add(call.name)
            elif call and reply.error not in MEANT:
                said[call.name].append(reply.text)
    alike = {tool: texts[0] for tool, texts in said.items() if tool not in answering and is_alike(texts)}
    return {tool: one_line(text, MAX_REPLY) for tool, text in alike.items()}


def is_alike(texts: Sequence[str]) -> bool:
    """Whether several answers are one."""
    return len(set(texts)) == 1 < len(texts)


def warn_of_refusing_tools(refusing: Mapping[str, str]) -> None:
    if refusing:
        told = first_few([f"{one_line(tool)} ({text})" for tool, text in refusing.items()])
        hidden = f" {OF_HIDDEN_ERRORS}" if any(hides_error(tool, text) for tool, text in refusing.items()) else ""
        warn(
            f"warning: every call of the references to {told} is refused, so the model learns nothing from it. A "
            f"server that lacks its data or a key answers so: see that the tool works, or do not show it.{hidden}"
        )


def first_refusal(script: Script, played: Played) -> tuple[str, str]:
    """The first tool that answered a call with an error, and what it said; empty where none did."""
    for call, reply in zip(script.calls, played.replies, strict=False):
        if reply.error is not None:
            return call.name if call else "a malformed call", one_line(reply.text, MAX_REPLY)
    return "", ""


def _failure_of(environment: Environment, script: Script, played: Played) -> Failure | None:
    error = played.error
    if isinstance(error, EnvironmentFault):
        return _failure_outside(error) if error.__cause__ is None else _crash_of_tool(error, error.__cause__)
    if error is not None:
        return _crash("the environment", error, "Correct its code, or the rows that it cannot take.")
    return _refusal_of_tool(environment, script, played)


def _failure_outside(fault: EnvironmentFault) -> Failure:
    who = fault.tool if fault.tool in REMEDIES else f"tool {one_line(fault.tool)}"
    how = f" ({fault.type}: {one_line(fault.message)})"
    return Failure((fault.tool, fault.type), f"the {who} failed", how, REMEDIES.get(fault.tool, OF_A_TOOL))


def _crash_of_tool(fault: EnvironmentFault, cause: BaseException) -> Failure:
    if fault.tool == "checker":
        return _crash("the checker", cause, "Correct the checker.", told=fault.message)
    if fault.tool == "environment":
        return _crash("the environment", cause, "See that whatever it asks itself answers, or correct its code.")
    return _crash(f"the tool {fault.tool}", cause, "Correct the tool; raise ToolError where only the call is wrong.")


def _crash(who: str, error: BaseException, remedy: str, *, told: str = "") -> Failure:
    line = users_line(error)
    how = f"{f' at {line}' if line else ''} ({told or f'{type(error).__name__}: {one_line(error)}'})"
    return Failure((who, type(error), line), f"{who} crashed", how, remedy)


def _refusal_of_tool(environment: Environment, script: Script, played: Played) -> Failure | None:
    """A reference that fails though its calls are well formed, where a tool refused one."""
    is_malformed = any(reply.error in MALFORMED for reply in played.replies)
    tool, said = first_refusal(script, played)
    if is_solved(played) or is_malformed or not tool or not environment.knows_solution(script.problem):
        return None
    remedy = "Correct the tool, or the calls of the references."
    if not environment.starts_afresh():
        remedy = f"{AFRESH} Else correct the tool, or the calls of the references."
    return Failure((tool, said), f"the tool {one_line(tool)} answers with an error", f" ({said})", remedy)
