"""The package's rows of telecom as Problems: the rules and a ticket, with the expert's actions and `done` as reference.

There are five different tickets: what is wrong is in the initial state alone. So problems with the same faults share a
split group, whatever their ticket and the user's persona, which a solo agent never meets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from tasks.core.files import json_hash
from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.environments.tau2.package import Task, read_tasks, solo_policy
from tasks.environments.tau2.tools import DONE

NO_FAULT = ("set_user_info", "set_user_location")
ANSWER = "The ticket is closed."
PROMPT = """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
You will be provided with a ticket that contains the user's request.
You will need to plan and call the appropriate tools to solve the ticket.

You cannot communicate with the user, only make tool calls.
Stop when you consider that you have solved the ticket.
To do so, call the tool `done`. Nothing can be changed after it, and the message that follows its reply ends the ticket.

Always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>
<ticket>
{ticket}
</ticket>"""


@cache
def problems() -> Mapping[str, Problem]:
    """All problems of telecom by id, in the package's order."""
    return {task["id"]: _problem(task) for task in read_tasks("telecom")}


def _problem(task: Task) -> Problem:
    criteria, actions = task["evaluation_criteria"], task["initial_state"]["initialization_actions"]
    solution = [ToolCall(name=action["name"], arguments=action["arguments"]) for action in criteria["actions"]]
    issue = re.match(r"\[(\w+)\]", task["id"])
    assert issue is not None, task["id"]
    is_asked = "ACTION" in criteria["reward_basis"]
    return Problem(
        id=task["id"],
        category=issue[1],
        level=len(solution),
        requests=[_prompt(task["ticket"])],
        world={
            "actions": actions,
            "assertions": criteria["env_assertions"],
            "required_calls": [
                {"name": action["name"], "arguments": action["arguments"], "compared": action["compare_args"]}
                for action in (criteria["actions"] if is_asked else [])
            ],
        },
        reference=[ReferenceTurn(calls=[*solution, ToolCall(name=DONE.name, arguments={})], answer=ANSWER)],
        split_group=f"faults {json_hash(faults(task))[:16]}",
    )


@cache
def _prompt(ticket: str) -> str:
    return PROMPT.format(policy=solo_policy(), ticket=ticket)


def faults(task: Task) -> list[list[object]]:
    """The set of faults injected before the episode, sorted: (who, method, arguments)."""
    actions = task["initial_state"]["initialization_actions"]
    found = [[item[key] for key in ("env_type", "func_name", "arguments")] for item in actions]
    return sorted((fault for fault in found if fault[1] not in NO_FAULT), key=str)
