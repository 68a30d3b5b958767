"""τ²-bench's telecom in solo mode.

The agent reads the rules and a ticket, and has the company's tools and those of the user's phone. It only makes calls:
after `done` nothing can be changed, and the next message ends the episode; a message before it ends it unsolved.
Success is the package's: its assertions hold in the final state and, where a problem asks for actions, they were made.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.environments.tau2 import experts
from tasks.environments.tau2.benchmark import Tau2, answer_as_package, cannot_set_up
from tasks.environments.tau2.package import load_module
from tasks.environments.tau2.problems import ANSWER, problems
from tasks.environments.tau2.settings import Tau2Settings
from tasks.environments.tau2.tools import DONE, all_tools, side_of
from tasks.environments.tau2.world import fresh, pristine
from tasks.tools.authoring import ToolEpisode
from tasks.tools.base import Answer, Demonstration, Expert, Tool, Verdict
from tasks.tools.layer import BoundTool, ToolError, ToolLayer
from tasks.tools.published import Scenes
from tasks.tools.settings import IN_MEMORY, ToolSettings

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


class TelecomEpisode(ToolEpisode):
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
        return answer_as_package(lambda: self.world.act(side_of()[name], name, arguments))

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


class Telecom(Tau2):
    episode_class = TelecomEpisode

    def __init__(self, limits: ToolSettings = IN_MEMORY, settings: Tau2Settings | None = None):
        super().__init__(limits, settings)
        self._states = Scenes(_starting_state)

    def bound_tools(self) -> list[BoundTool]:
        return [_bind(tool) for tool in all_tools()]

    def problems(self) -> Mapping[str, Problem]:
        return problems()

    def start(self, problem: Problem, *, stream: str = "") -> TelecomEpisode:
        return TelecomEpisode(problem, self._states.of(problem), self.layer)

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


def _starting_state(problem: Problem) -> bytes:
    """The world of a problem. What its row names is tried once, so no verdict fails on it later."""
    try:
        world = problem.world
        state = pristine(world["actions"])
        for assertion in world["assertions"]:
            fresh(state).holds(assertion)
        for call in world["required_calls"]:
            call["name"], call["arguments"], call["compared"]
    except Exception as error:  # the package's methods carry out the row, and may raise anything
        raise cannot_set_up(problem, error, "actions, assertions and required_calls") from error
    return state


def _bind(tool: Tool) -> BoundTool:
    def make(episode: TelecomEpisode, arguments: Mapping[str, Any]) -> str:
        return episode.finish() if tool.name == DONE.name else episode.act(tool.name, arguments)

    return BoundTool(tool, make, "memory")
