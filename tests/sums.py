"""A small world for curation: `add(amount)` until the total is the target, then say the total.

`worlds` puts it in the catalog for a test; whoever imports that fixture has it for every test of the file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from tasks.core.records import Demonstration, Problem, ToolCall
from tasks.core.tool_calls import call_text
from tasks.stages.curate.settings import CurateSections, CurateSettings
from tasks.tools.authoring import ToolEnvironment, ToolEpisode, tool
from tasks.tools.base import Expert, Verdict, block_until
from tests.worlds import add_environment, environment_settings


class SumEpisode(ToolEpisode):
    """Adds up; an amount that is no integer above 0 is an invalid call."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.target, self.total = problem.world["target"], 0

    @tool("Add an amount.")
    def add(self, amount: Annotated[int, Field(ge=1)]) -> str:
        self.total += amount
        return f"total {self.total}"

    def verdict(self, final_message: str | None) -> Verdict:
        checks = {"total": self.total == self.target, "answer": final_message == str(self.target)}
        return Verdict(all(checks.values()), checks)


class Sums(ToolEnvironment):
    """A world without a generator or an expert."""

    name = "sums"
    episode_class = SumEpisode


class SumsWithExpert(Sums):
    """Its expert adds 1 at a time and, by chance, greets or not; it refuses problems marked as hard."""

    name = "sums_with_expert"

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        for index in range(num_problems):
            yield problem(f"s-{seed}-{index}", target=1 + index % 5, group=f"g{index // 2}", marker=index)

    def expert(self) -> Expert:
        return self.demonstrate

    def demonstrate(self, problem: Problem, rng: random.Random) -> Demonstration | None:
        if problem.category == "hard":
            return None
        target = problem.world["target"]
        parts = [1] * target if rng.random() < 0.5 else [target]
        episode = self.start(problem)
        replies = [[block_until(episode.call("add", {"amount": part})).text] for part in parts]
        texts = [call_text(ToolCall(name="add", arguments={"amount": part})) for part in parts]
        return Demonstration(
            problem_id=problem.id,
            request=problem.requests[0],
            assistant_texts=[*texts, str(target)],
            replies=[*replies, []],
        )


@pytest.fixture(autouse=True)
def worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    for world in (Sums, SumsWithExpert):
        add_environment(monkeypatch, world.name, world)


def problem(
    id: str = "p", *, target: int = 3, category: str = "easy", group: str = "g", marker: int = 0, **changed: Any
) -> Problem:
    """Sum up to a target, solved by one call; `marker` makes the content differ."""
    row = {
        "id": id,
        "category": category,
        "level": 1,
        "requests": [f"Make {target}."],
        "world": {"target": target, "marker": marker},
        "reference": [{"calls": [{"name": "add", "arguments": {"amount": target}}], "answer": str(target)}],
        "split_group": group,
    }
    return Problem.model_validate({**row, **changed})


def many(num: int = 60, *, group_size: int = 2) -> list[dict[str, Any]]:
    """Rows of two categories in groups of two; the ids are p0, p1, …"""
    return [
        problem(
            f"p{i}", target=1 + i % 7, category=("easy", "plain")[i % 2], group=f"g{i // group_size}", marker=i
        ).model_dump()
        for i in range(num)
    ]


def options(**changed: Any) -> CurateSettings:
    values = {
        "source": "tasks/environments/travel_desk",
        "num_generated": 60,
        "max_level": 3,
        "split": "groups",
        "split_seed": 0,
        "train_share": 0.5,
        "max_select_problems": 10,
        "max_test_problems": 10,
        "num_test_sets": 1,
        "test_rotation": 0,
        "num_demonstrations": 8,
        "sharded": None,
        "num_probe_problems": 2,
    }
    return CurateSettings.model_validate({**values, **changed})


def curate_settings(world: str = "sums_with_expert", **changed: Any) -> CurateSections:
    changed = {"source": f"tasks/environments/{world}", **changed}
    environment = environment_settings(world)
    return CurateSections(seed=7, environment=environment, curate=options(**changed))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
