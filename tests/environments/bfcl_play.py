"""What the tests of bfcl play with: one world, and a conversation played in it from its calls."""

from __future__ import annotations

from typing import Any

from tasks.core.records import Problem, ToolCall
from tasks.environments.bfcl.environment import BFCL, BFCLEpisode
from tasks.environments.bfcl.problems import problems
from tasks.environments.bfcl.settings import BFCLCategory
from tasks.tools.base import Verdict
from tests.environments.bfcl_mutations import Case, Conversation

WORLD = BFCL()
BASE: BFCLCategory = "multi_turn_base"
LONG: BFCLCategory = "multi_turn_long_context"


def solution(problem: Problem) -> Conversation:
    return [list(turn.calls) for turn in problem.reference]


def play(problem: Problem, turns: Conversation) -> tuple[BFCLEpisode, Verdict]:
    episode = WORLD.start(problem)
    for number, calls in enumerate(turns):
        if number:
            episode.end_turn(None)
        for call in calls:
            episode.call(call.name, call.arguments)
    return episode, episode.verdict(None)


def ours(case: Case) -> tuple[bool, str | None]:
    verdict = play(case.problem, case.turns)[1]
    return verdict.success, verdict.details["error_type"]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def with_class(name: str, category: BFCLCategory = BASE) -> Problem:
    return next(problem for problem in problems(category, "all") if name in problem.world["involved_classes"])
