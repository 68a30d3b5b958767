"""The package's rows of retail and airline as Problems: who calls and why, and what the agent should do.

Whoever plays the user reads `world.user`. A script has no words of its own, so its one message is the whole scenario
as the package tells it to a user, and its consent. Problems of one customer share a split group: they are about the
same orders or reservations, and often the same wish told otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.environments.tau2.database import Database
from tasks.environments.tau2.package import Task, data_file, load_module, read_tasks, tool_error
from tasks.environments.tau2.settings import Domain
from tasks.environments.tau2.tools import READS

CHANGES_NOTHING = ("calculate", "transfer_to_human_agents")  # and the package does not replay them
NO_CHANGE = "no_change"
CONSENT = "I confirm all of this, so you need not ask me again."
DONE = "That is done."
RULES = """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
In each turn you can either:
- Send a message to the user.
- Make a tool call.
You cannot do both at the same time.

Try to be helpful and always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>"""


@cache
def problems(domain: Domain) -> Mapping[str, Problem]:
    """All problems of the domain by id, in the package's order."""
    found = [_problem(domain, task) for task in read_tasks(domain)]
    return {problem.id: problem for problem in found}


@cache
def rules(domain: Domain) -> str:
    """What the agent reads before the user speaks, as τ²-bench arranges it."""
    return RULES.format(policy=data_file(domain, "policy.txt").read_text(encoding="utf-8").strip())


def guidelines(problem: Problem) -> str:
    """What the package tells the model that plays its user."""
    general: str = load_module("utils").USER_SIMULATOR_GUIDELINES
    return f"{general}\n<scenario>\n{problem.world['user']['scenario']}\n</scenario>\n"


def replay(domain: Domain, actions: list[dict[str, Any]]) -> Database:
    """The database as the expert's actions leave it. One that the package refuses changes nothing more."""
    database = Database(domain)
    for action in actions:
        if action["name"] not in CHANGES_NOTHING:
            try:
                database.act(action["name"], action["arguments"])
            except tool_error():
                continue
    return database


def _problem(domain: Domain, task: Task) -> Problem:
    criteria, user = task["evaluation_criteria"], task["user_scenario"]
    actions = [{"name": action["name"], "arguments": action["arguments"]} for action in criteria["actions"]]
    changes = [action["name"] for action in actions if not action["name"].startswith((*READS, *CHANGES_NOTHING))]
    told = criteria["communicate_info"]
    scenario = str(load_module("data_model.tasks").UserScenario.model_validate(user))
    return Problem(
        id=task["id"],
        category=changes[0] if changes else NO_CHANGE,
        level=max(1, len(actions)),
        requests=[_script(user["instructions"])],
        world={
            "user": {
                "persona": user["persona"] or "",
                "scenario": scenario,
                "goal": user["instructions"]["reason_for_call"],
            },
            "actions": actions,
            "communicate": told,
        },
        reference=[
            ReferenceTurn(
                calls=[ToolCall(name=action["name"], arguments=action["arguments"]) for action in actions],
                answer=" ".join([DONE, *(f"{info}." for info in told)]),
            )
        ],
        split_group=f"customer {' '.join(_customers(domain, actions, scenario))}",
    )


def _script(instructions: Mapping[str, str | None]) -> str:
    keys = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
    return "\n\n".join([*(text for key in keys if (text := instructions[key])), CONSENT])


def _customers(domain: Domain, actions: list[dict[str, Any]], scenario: str) -> list[str]:
    """The ids of the customers whose records the expert meets or the scenario names."""
    tables = replay(domain, actions).tables
    met = {record.user_id for table in tables.values() for record in table.own.values() if hasattr(record, "user_id")}
    met |= {id for id in re.findall(r"\w+_\w+_\d+", scenario) if id in tables["users"]}
    return sorted(met) or sorted(id for id, user in tables["users"].items() if _is_named(user, scenario))


def _is_named(user: Any, scenario: str) -> bool:
    """By name and postal code, as a desk finds a customer."""
    return f"{user.name.first_name} {user.name.last_name}" in scenario and user.address.zip in scenario
