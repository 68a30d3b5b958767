"""bfcl: the multi-turn categories of the Berkeley Function Calling Leaderboard, checked as the package checks them.

After each user request, the model's instances must equal the ground truth's, attribute by attribute, and each reply of
the ground truth must be among the model's replies so far. Extra calls are no failure. A request whose ground truth has
no call is not judged: it lacks a parameter or a function.

Verdicts equal those of `multi_turn_checker`, except where its regular expressions change text arguments (an instance
name before `tool(`, white space before `(`); that is not copied. Left out: `excluded_function`, which the package does
not read, and the memory and web search categories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from tasks.core.files import json_hash
from tasks.core.records import Problem, ReferenceTurn, ToolCall
from tasks.environments.bfcl.backend import fresh, pristine
from tasks.environments.bfcl.package import CLASSES, data_hashes, tools_of_class
from tasks.environments.bfcl.problems import (
    ROWS_PER_CATEGORY,
    chosen_problems,
    conversations,
    not_judged,
    published_halves,
)
from tasks.environments.bfcl.settings import BFCL_CATEGORIES, BFCLSettings
from tasks.tools.authoring import ToolEnvironment, ToolEpisode
from tasks.tools.base import Answer, SourceCount, Tool, ToolReply, Verdict
from tasks.tools.layer import BoundTool, ToolLayer
from tasks.tools.published import Scenes, draw_problems
from tasks.tools.settings import IN_MEMORY, ToolSettings

EMPTY, STATE, RESPONSE = "empty_turn_model_response", "instance_state_mismatch", "execution_response_mismatch"
MAX_MISSING, MAX_MISSING_CHARACTERS = 5, 200


@dataclass(frozen=True, slots=True)
class Scene:
    layer: ToolLayer
    state: bytes


class BFCLEpisode(ToolEpisode):
    """`failure` is the result of the first turn that failed; later turns are not checked."""

    validation: ClassVar[Literal["reject", "report"]] = "report"  # a rejected call would change verdicts

    def __init__(self, problem: Problem, scene: Scene):
        super().__init__(problem)
        self.layer = scene.layer
        self.model, self.truth = fresh(scene.state)
        self.responses: list[str] = []
        self.turn = self.num_calls = 0  # the current user request, and its calls so far
        self.failure: dict[str, Any] | None = None
        self._was_exception = False

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        self.num_calls += 1
        self._was_exception = False
        reply = self.layer.call(self, name, arguments)
        assert isinstance(reply, ToolReply)
        return replace(reply, valid=False) if self._was_exception else reply

    def make(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Carry out a call. The check reads the whole reply; the model reads what the tool layer leaves of it."""
        text, self._was_exception = self.model.answer(tool, arguments)
        self.responses.append(text)
        return text

    def end_turn(self, message: str | None) -> None:
        reference = self.problem.reference
        if self.failure is None and self.turn < len(reference):
            self.failure = self._check(reference[self.turn].calls)
        self.turn, self.num_calls = self.turn + 1, 0

    def verdict(self, final_message: str | None) -> Verdict:
        self.end_turn(final_message)
        if self.failure is None:
            return Verdict(True, dict.fromkeys(("answered", "state", "response"), True), {"error_type": None})
        checks = {
            "answered": self.failure["error_type"] != EMPTY,
            "state": not self.failure["differing"],
            "response": not self.failure["missing"],
        }
        return Verdict(False, checks, self.failure)

    def _check(self, truth: Sequence[ToolCall]) -> dict[str, Any] | None:
        """What is wrong after a turn. Plays the ground truth on its own instances first."""
        if not truth:
            return None
        expected = [self.truth.answer(call.name, call.arguments)[0] for call in truth]
        differing = self.model.differences(self.truth)
        missing = list((Counter(expected) - Counter(self.responses)).elements())
        if self.num_calls and not differing and not missing:
            return None
        return {
            "error_type": EMPTY if not self.num_calls else STATE if differing else RESPONSE,
            "turn": self.turn,
            "differing": differing,
            "missing": [text[:MAX_MISSING_CHARACTERS] for text in missing[:MAX_MISSING]],
        }


class BFCL(ToolEnvironment):
    name = "bfcl"
    episode_class = BFCLEpisode
    packages = ("bfcl-eval",)

    def __init__(self, limits: ToolSettings = IN_MEMORY, settings: BFCLSettings | None = None):
        super().__init__(limits)
        self.chosen = settings
        self.layer = self._layer(CLASSES)
        self._layers: dict[tuple[str, ...], ToolLayer] = {}
        self._scenes = Scenes(self._scene)

    @classmethod
    def from_settings(cls, settings: BFCLSettings | None, tools: ToolSettings) -> Self:
        return cls(tools, settings)

    def tools_for(self, problem: Problem) -> tuple[Tool, ...]:
        """The tools of the problem's classes, without those that a later request adds."""
        held_out = {name for names in problem.world.get("held_out", {}).values() for name in names}
        tools = (tool for name in problem.world["involved_classes"] for tool in tools_of_class(name))
        return tuple(tool for tool in tools if tool.name not in held_out)

    def start(self, problem: Problem, *, stream: str = "") -> BFCLEpisode:
        return BFCLEpisode(problem, self._scenes.of(problem))

    def generate(self, *, seed: int, num_problems: int, max_level: int) -> Iterator[Problem]:
        """The chosen categories in the package's order, or a random sample; level = calls of the ground truth."""
        drawn, _ = self._draw(seed, num_problems, max_level)
        yield from drawn

    def count_source(self, *, seed: int, num_problems: int, max_level: int) -> SourceCount:
        """How many of 200 rows per category `generate` must return, and why the others are left out."""
        chosen = self._chosen()
        _, others = self._draw(seed, num_problems, max_level)
        left_out = {"no call is judged, so the problem cannot fail": not_judged(chosen), **others}
        num_left_out = sum(map(len, left_out.values()))
        return SourceCount(ROWS_PER_CATEGORY * len(chosen.categories) - num_left_out, left_out)

    def published_halves(self) -> tuple[frozenset[str], frozenset[str]]:
        return published_halves()

    def baselines(self, problem: Problem) -> dict[str, list[ReferenceTurn]]:
        """The ground truth; all read-only tools that need no argument; and no call."""
        looks = [
            ToolCall(name=tool.name, arguments={})
            for tool in self.tools_for(problem)
            if tool.read_only and not tool.parameters["required"]
        ]
        return {
            "ground_truth": list(problem.reference),
            "blind_read_only": [ReferenceTurn(calls=looks, answer="") for _ in problem.requests],
            "empty": [ReferenceTurn(calls=[], answer="") for _ in problem.requests],
        }

    def find_problem(self, problem_id: str) -> Problem:
        category = problem_id.rpartition("_")[0]
        found = conversations(category).get(problem_id) if category in BFCL_CATEGORIES else None
        if found is None:
            raise ValueError(f"there is no problem {problem_id!r}")
        return found

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "data": json_hash(dict(data_hashes(BFCL_CATEGORIES)))}

    def _draw(self, seed: int, num_problems: int, max_level: int) -> tuple[list[Problem], dict[str, list[str]]]:
        rows = chosen_problems(self._chosen())
        return draw_problems(rows, seed=seed, num_problems=num_problems, max_level=max_level, level_counts="calls")

    def _chosen(self) -> BFCLSettings:
        if self.chosen is None:
            raise ValueError(
                "environment.settings is null, so bfcl does not know which problems to use. Write, for example, "
                "environment.settings: {categories: [multi_turn_base], turns: first}."
            )
        return self.chosen

    def _scene(self, problem: Problem) -> Scene:
        try:
            classes, category = tuple(problem.world["involved_classes"]), problem.world["category"]
            if not set(classes) <= set(CLASSES):
                raise ValueError(f"it knows the classes {', '.join(CLASSES)}")
            is_long = category == "multi_turn_long_context"
            state = pristine(classes, problem.world["initial_config"], long_context=is_long)
        except Exception as error:  # the package's classes load the row, and may raise anything
            raise ValueError(
                f"problem {problem.id!r}: bfcl cannot set it up ({type(error).__name__}: {error}). A row needs "
                f"category, involved_classes and initial_config, as `python -m tasks curate` writes them."
            ) from error
        if classes not in self._layers:
            self._layers[classes] = self._layer(classes)
        return Scene(self._layers[classes], state)

    def _layer(self, classes: Iterable[str]) -> ToolLayer:
        tools = [tool for name in classes for tool in tools_of_class(name)]
        return ToolLayer([_bind(tool) for tool in tools], self.limits, validation=BFCLEpisode.validation)


def _bind(tool: Tool) -> BoundTool:
    def make(episode: BFCLEpisode, arguments: Mapping[str, Any]) -> str:
        return episode.make(tool.name, arguments)

    return BoundTool(tool, make, "memory")


ENVIRONMENT = BFCL
