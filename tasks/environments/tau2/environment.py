"""tau2: τ²-bench's telecom in solo mode, with the package's worlds, tools, rules and verdicts.

The agent reads the rules and a ticket, and has the company's tools and those of the user's phone. It only makes calls:
after `done` nothing can be changed, and the next message ends the episode; a message before it ends it unsolved.
Success is the package's: its assertions hold in the final state and, where a problem asks for actions, they were made.

Left out: the mode with a user who holds the phone, and the banking domain.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from tasks.core.files import json_hash
from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.core.text import one_line
from tasks.environments.tau2 import experts
from tasks.environments.tau2.package import data_hashes, load_module, tool_error
from tasks.environments.tau2.problems import ANSWER, NUM_PROBLEMS, draw, problems, published_halves
from tasks.environments.tau2.settings import Tau2Settings
from tasks.environments.tau2.tools import DONE, all_tools, side_of
from tasks.environments.tau2.world import fresh, in_text, pristine
from tasks.tools.authoring import ToolEnvironment, ToolEpisode
from tasks.tools.base import Answer, Demonstration, Expert, Halves, SourceCount, Tool, Verdict
from tasks.tools.layer import BoundTool, ToolError, ToolLayer
from tasks.tools.settings import IN_MEMORY, ToolSettings

MAX_REASON_CHARACTERS = 300
# Fixes that do no harm where nothing is broken, so a policy may make them without a look.
HARMLESS = (
    ToolCall(name="grant_app_permission", arguments={"app_name": "messaging", "permission": "storage"}),
    ToolCall(name="grant_app_permission", arguments={"app_name": "messaging", "permission": "sms"}),
    ToolCall(name="set_network_mode_preference", arguments={"mode": "4g_5g_preferred"}),
    ToolCall(name="reseat_sim_card", arguments={}),
    ToolCall(name="disconnect_vpn", arguments={}),
    ToolCall(name="reset_apn_settings", arguments={}),
    ToolCall(name="reboot_device", arguments={}),
)


@dataclass(frozen=True, slots=True)
class Scene:
    world: Mapping[str, Any]
    state: bytes


class Tau2Episode(ToolEpisode):
    """`made`: every call before `done`, refused ones too, as the package's check of actions counts them."""

    def __init__(self, problem: Problem, state: bytes, layer: ToolLayer):
        super().__init__(problem)
        self.layer, self.world = layer, fresh(state)
        self.made: list[ToolCall] = []
        self.is_done = False

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        if not self.is_done and name in side_of():
            self.made.append(ToolCall(name=name, arguments=dict(arguments)))
        return self.layer.call(self, name, arguments)

    def act(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self.is_done:
            raise ToolError("conflict", "the ticket is closed, and nothing can be changed")
        try:
            return in_text(self.world.act(side_of()[name], name, arguments))
        except tool_error() as error:
            raise ToolError("not_found" if "not found" in str(error) else "conflict", str(error)) from None
        except Exception as error:  # the package's methods check little of what they are given
            raise ToolError("invalid_arguments", one_line(error, MAX_REASON_CHARACTERS)) from None

    def finish(self) -> str:
        self.is_done = True
        return "The ticket is closed. The next message ends it."

    def verdict(self, final_message: str | None) -> Verdict:
        failed = [item["func_name"] for item in self.problem.world["assertions"] if not self.world.holds(item)]
        missing = [item["name"] for item in self.problem.world["required_calls"] if not self._was_made(item)]
        checks = {"done": self.is_done, "assertions": not failed, "actions": not missing}
        return Verdict(all(checks.values()), checks, {"failed_assertions": failed, "missing_actions": missing})

    def _was_made(self, required: Mapping[str, Any]) -> bool:
        """As the package compares: the arguments it names, or all; a transfer by its name alone."""
        compared = [] if required["name"] == "transfer_to_human_agents" else required["compared"]
        expected = required["arguments"]
        equal = load_module("utils").deep_equal_unordered
        for call in self.made:
            keys = compared if compared is not None else [*expected, *call.arguments]
            if call.name == required["name"] and all(equal(call.arguments.get(k), expected.get(k)) for k in keys):
                return True
        return False


class Tau2(ToolEnvironment):
    name = "tau2"
    episode_class = Tau2Episode
    packages = ("inspect-evals",)

    def __init__(self, limits: ToolSettings = IN_MEMORY, settings: Tau2Settings | None = None):
        self.limits, self.settings = limits, settings
        self.layer = ToolLayer([_bind(tool) for tool in all_tools()], limits)
        self._scenes: dict[str, Scene] = {}

    @classmethod
    def from_settings(cls, settings: Tau2Settings | None, tools: ToolSettings) -> Self:
        return cls(tools, settings)

    def start(self, problem: Problem, *, stream: str = "") -> Tau2Episode:
        scene = self._scenes.get(problem.id)
        if scene is None or (scene.world is not problem.world and scene.world != problem.world):
            scene = self._scenes[problem.id] = _scene(problem)
        return Tau2Episode(problem, scene.state, self.layer)

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        """The chosen problems in the package's order, or a random sample; level = the expert's actions."""
        yield from draw(self._chosen().problems, seed=seed, num_problems=num_problems, max_level=max_level)[0]

    def count_source(self, *, seed: int, num_problems: int, max_level: int) -> SourceCount:
        chosen = self._chosen().problems
        _, others = draw(chosen, seed=seed, num_problems=num_problems, max_level=max_level)
        left_out = {
            f"more than {max_level} actions (curate.max_level)": [row.id for row in others if row.level > max_level],
            f"not among the {num_problems} drawn (curate.num_generated)": [
                row.id for row in others if row.level <= max_level
            ],
        }
        return SourceCount(NUM_PROBLEMS[chosen] - sum(map(len, left_out.values())), left_out)

    def published_halves(self) -> Halves:
        return published_halves()

    def expert(self) -> Expert:
        def demonstrate(problem: Problem, rng: random.Random) -> Demonstration | None:
            return experts.demonstrate(self, problem, rng)

        return demonstrate

    def baselines(self, problem: Problem) -> dict[str, list[ReferenceTurn]]:
        """The expert; every harmless fix, without a look; and `done` alone."""
        done = ToolCall(name=DONE.name, arguments={})
        return {
            "expert": list(problem.reference),
            "harmless_fixes": [ReferenceTurn(calls=[*HARMLESS, done], answer=ANSWER)],
            "done_alone": [ReferenceTurn(calls=[done], answer=ANSWER)],
        }

    def find_problem(self, problem_id: str) -> Problem:
        found = problems().get(problem_id)
        if found is None:
            raise ValueError(f"there is no problem {problem_id!r}")
        return found

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "data": json_hash(dict(data_hashes()))}

    def _chosen(self) -> Tau2Settings:
        if not isinstance(self.settings, Tau2Settings):
            raise ValueError(
                "environment.settings is null, so tau2 does not know which problems to use. Write, for example, "
                "environment.settings: {domain: telecom, problems: base}."
            )
        return self.settings


def _scene(problem: Problem) -> Scene:
    """The world of a problem. What its row names is tried once, so no verdict fails on it later."""
    try:
        world = problem.world
        state = pristine(world["actions"])
        for assertion in world["assertions"]:
            fresh(state).holds(assertion)
        for call in world["required_calls"]:
            call["name"], call["arguments"], call["compared"]
    except Exception as error:  # the package's methods carry out the row, and may raise anything
        raise ValueError(
            f"problem {problem.id!r}: tau2 cannot set it up ({type(error).__name__}: {error}). A row needs actions, "
            f"assertions and required_calls, as `python -m tasks curate` writes them."
        ) from error
    return Scene(problem.world, state)


def _bind(tool: Tool) -> BoundTool:
    def make(episode: Tau2Episode, arguments: Mapping[str, Any]) -> str:
        return episode.finish() if tool.name == DONE.name else episode.act(tool.name, arguments)

    return BoundTool(tool, make, "memory")


ENVIRONMENT = Tau2
