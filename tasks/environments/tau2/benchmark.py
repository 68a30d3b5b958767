"""What the domains of tau2 share: the package's rows as problems, drawn and counted, and how its tools answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.core.text import one_line
from tasks.environments.tau2.package import data_hashes, in_text, read_splits, tool_error
from tasks.environments.tau2.settings import Domain, Problems, Tau2Settings
from tasks.tools.authoring import ToolEnvironment
from tasks.tools.base import Halves, SourceCount
from tasks.tools.layer import BoundTool, ToolError, ToolLayer
from tasks.tools.published import draw_problems
from tasks.tools.settings import IN_MEMORY, ToolSettings

MAX_REASON_CHARACTERS = 300
NUM_PROBLEMS: Mapping[tuple[Domain, Problems], int] = {  # as published
    ("telecom", "full"): 2285, ("telecom", "base"): 114, ("telecom", "small"): 20,
    ("retail", "base"): 114, ("airline", "base"): 50,
}  # fmt: skip


class Tau2(ToolEnvironment):
    """`problems()` of a subclass are all of its domain by id, in the package's order."""

    name = "tau2"
    packages = ("inspect-evals",)

    def __init__(self, limits: ToolSettings = IN_MEMORY, settings: Tau2Settings | None = None):
        self.limits, self.settings = limits, settings
        self.layer = ToolLayer(self.bound_tools(), limits)

    @classmethod
    def from_settings(cls, settings: Tau2Settings | None, tools: ToolSettings) -> Self:
        return cls(tools, settings)

    @property
    def domain(self) -> Domain:
        return "telecom" if self.settings is None else self._chosen().domain

    def bound_tools(self) -> Sequence[BoundTool]:
        raise NotImplementedError

    def problems(self) -> Mapping[str, Problem]:
        raise NotImplementedError

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        """The chosen problems in the package's order, or a random sample; level = the expert's actions."""
        drawn, _ = self._draw(seed, num_problems, max_level)
        yield from drawn

    def count_source(self, *, seed: int, num_problems: int, max_level: int) -> SourceCount:
        _, left_out = self._draw(seed, num_problems, max_level)
        published = NUM_PROBLEMS[self.domain, self._chosen().problems]
        return SourceCount(published - sum(map(len, left_out.values())), left_out)

    def published_halves(self) -> Halves:
        """(train, test) of the official split; together they are `base`."""
        splits = read_splits(self.domain)
        return frozenset(splits["train"]), frozenset(splits["test"])

    def find_problem(self, problem_id: str) -> Problem:
        found = self.problems().get(problem_id)
        if found is None:
            raise ValueError(f"there is no problem {problem_id!r}")
        return found

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "data": json_hash(dict(data_hashes(self.domain)))}

    def _draw(self, seed: int, num_problems: int, max_level: int) -> tuple[list[Problem], dict[str, list[str]]]:
        ids = set(read_splits(self.domain)[self._chosen().problems])
        rows = [problem for id, problem in self.problems().items() if id in ids]
        return draw_problems(rows, seed=seed, num_problems=num_problems, max_level=max_level, level_counts="actions")

    def _chosen(self) -> Tau2Settings:
        if not isinstance(self.settings, Tau2Settings):
            raise ValueError(
                "environment.settings is null, so tau2 does not know which problems to use. Write, for example, "
                "environment.settings: {domain: telecom, problems: base}."
            )
        return self.settings


def answer_as_package(method: Callable[[], Any]) -> str:
    """The text of what a method of the package returns; ToolError where it refuses the call."""
    try:
        return in_text(method())
    except tool_error() as error:
        raise ToolError("not_found" if "not found" in str(error) else "conflict", str(error)) from None
    except Exception as error:  # the package's methods check little of what they are given
        raise ToolError("invalid_arguments", one_line(error, MAX_REASON_CHARACTERS)) from None


def cannot_set_up(problem: Problem, error: Exception, needed: str) -> ValueError:
    """Of a row whose world the package cannot make."""
    return ValueError(
        f"problem {problem.id!r}: tau2 cannot set it up ({type(error).__name__}: {error}). A row needs {needed}, as "
        f"`python -m tasks curate` writes them."
    )
