"""A world whose one tool computes for some milliseconds of CPU, for benchmarks of the pool."""

from __future__ import annotations

import time
from typing import Any

from tasks.core.records import Problem
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Environment, Verdict
from tests.worlds import QUICK

MAKE = f"{__name__}:make"


class BusyEpisode(ToolEpisode):
    @tool("Compute for so many milliseconds.")
    def compute(self, milliseconds: float) -> str:
        end = time.thread_time() + milliseconds / 1e3
        while time.thread_time() < end:
            pass
        return "computed"

    def verdict(self, final_message: str | None) -> Verdict:
        return Verdict(final_message == "Done.")


class Busy(ToolEnvironment):
    """`rules` is what makes its prompts long."""

    name, episode_class, rules = "busy", BusyEpisode, ""

    def rules_for(self, problem: Problem) -> str:
        return self.rules


def make(section: dict[str, Any]) -> Environment:
    return Busy(QUICK)
