"""τ²-bench's retail and airline: a customer speaks first, and the agent has the company's policy and tools.

A message of the agent that makes no call is said to the customer; the episode ends when the customer is done. Success
is the package's: the database is as the expert's actions leave it, and what the agent said contains what it had to
tell. The assertions in natural language of 8 and 50 problems are left out, as the package's own scorer leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any

from tasks.core.records import Problem, ReferenceTurn
from tasks.environments.tau2.benchmark import Tau2, answer_as_package, cannot_set_up
from tasks.environments.tau2.database import Database
from tasks.environments.tau2.desk_problems import CHANGES_NOTHING, guidelines, problems, replay, rules
from tasks.environments.tau2.package import load_module
from tasks.environments.tau2.settings import Domain, Tau2Settings
from tasks.environments.tau2.tools import tool_of
from tasks.tools.authoring import ToolEpisode
from tasks.tools.base import Verdict
from tasks.tools.layer import BoundTool, ToolLayer
from tasks.tools.published import Scenes
from tasks.tools.settings import IN_MEMORY, ToolSettings

REFUSAL = "I cannot help you with that."


class DeskEpisode(ToolEpisode):
    """`said` are the agent's messages to the customer."""

    def __init__(self, problem: Problem, domain: Domain, expected: Database, layer: ToolLayer):
        super().__init__(problem)
        self.layer, self.expected, self.database = layer, expected, Database(domain)
        self.said: list[str] = []

    def end_turn(self, message: str | None) -> None:
        self.said += [] if message is None else [message]

    def verdict(self, final_message: str | None) -> Verdict:
        said = [*self.said, *([] if final_message is None else [final_message])]
        heard = "\n".join(said).lower().replace(",", "")
        missing = [info for info in self.problem.world["communicate"] if info.lower() not in heard]
        differing = self.database.differences(self.expected)
        checks = {"database": not differing, "communicated": not missing}
        return Verdict(all(checks.values()), checks, {"differing_records": differing, "missing_info": missing})


class Desk(Tau2):
    episode_class = DeskEpisode

    def __init__(self, limits: ToolSettings = IN_MEMORY, settings: Tau2Settings | None = None):
        super().__init__(limits, settings)
        self._expected = Scenes(self._expect)

    def bound_tools(self) -> list[BoundTool]:
        return _bound_tools(self.domain)

    def problems(self) -> Mapping[str, Problem]:
        return problems(self.domain)

    def rules_for(self, problem: Problem) -> str:
        return rules(self.domain)

    def user_guidelines(self, problem: Problem) -> str:
        return guidelines(problem)

    def start(self, problem: Problem, *, stream: str = "") -> DeskEpisode:
        return DeskEpisode(problem, self.domain, self._expected.of(problem), self.layer)

    def baselines(self, problem: Problem) -> dict[str, list[ReferenceTurn]]:
        """The expert, and a refusal without a call."""
        return {"expert": list(problem.reference), "refusal": [ReferenceTurn(calls=[], answer=REFUSAL)]}

    def _expect(self, problem: Problem) -> Database:
        """As the expert leaves it. What its row names is tried once, so no verdict fails on it later."""
        world = problem.world
        try:
            expected = replay(self.domain, world["actions"])
            [info.lower() for info in world["communicate"]]
            guidelines(problem)
        except Exception as error:  # the package's methods carry out the row, and may raise anything
            raise cannot_set_up(problem, error, "user.scenario, actions and communicate") from error
        return expected


@cache
def _bound_tools(domain: Domain) -> list[BoundTool]:
    """In the package's order, which wraps each in a function that makes it."""
    wrappers = getattr(load_module(f"{domain}.tools"), f"all_{domain}_tools")
    return [_bind(wrapper.__name__, wrapper()) for wrapper in wrappers]


def _bind(name: str, wrapped: Callable[..., Coroutine[Any, Any, Any]]) -> BoundTool:
    def make(episode: DeskEpisode, arguments: Mapping[str, Any]) -> str:
        if name in CHANGES_NOTHING:
            return answer_as_package(lambda: _finish(wrapped(**arguments)))
        return answer_as_package(lambda: episode.database.act(name, arguments))

    return BoundTool(tool_of(name, wrapped), make, "memory")


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a tool of the package without a state waits for nothing")
