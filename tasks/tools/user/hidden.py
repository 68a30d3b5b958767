"""What a problem tells its user and nobody else: `world["user"]`, which no prompt contains.

    {"persona": "You are in a hurry.", "scenario": "Your flight was cancelled.", "goal": "Get the money back.",
     "shards": ["I want to cancel.", "It is booking B12."]}

Every key may be absent. `shards` are the request in parts, in the order in which the user tells them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, ValidationError

from tasks.core.records import Problem, Record
from tasks.tools.base import Environment

KEY = "user"


class HiddenGoal(Record):
    """A problem's `world["user"]`."""

    persona: str = ""
    scenario: str = ""
    goal: str = ""
    shards: list[str] = Field(default_factory=list)


def hidden_goal(problem: Problem) -> HiddenGoal:
    """ValueError where the row says something else; empty where it says nothing."""
    try:
        return HiddenGoal.model_validate(problem.world.get(KEY, {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"problem {problem.id!r}: world.{KEY}.{'.'.join(map(str, first['loc']))}: {first['msg']}, so nobody can "
            f"play its user. It may have persona, scenario, goal (texts) and shards (a list of texts); correct it."
        ) from None


def shards_of(environment: Environment, problem: Problem) -> Sequence[str]:
    """The request in parts: the problem's own, else as its environment cuts it; fewer than two where it has none."""
    return hidden_goal(problem).shards or environment.shards(problem)
