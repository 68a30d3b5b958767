"""The package's own play and verdict of a problem: its tools, its environment, its scorer, as it wires them.

Its modules are loaded a second time, with stand-ins for all that they import of inspect_ai, and leave again; so what
turnwise loads is neither used nor changed. Its state is the package's store: one object per class.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partialmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tasks.core.records import ToolCall
from tasks.environments.tau2.package import PACKAGE, Task, data_file
from tasks.environments.tau2.settings import Domain

NAMES = ("", ".tool", ".util", ".model", ".agent", ".scorer", ".solver", ".dataset")
STORE: dict[str, Any] = {}


class Message:
    """An assistant's message with one call."""

    content = ""

    def __init__(self, call: ToolCall):
        self.tool_calls = [SimpleNamespace(function=call.name, arguments=call.arguments)]


class Said:
    """A message to the user; the scorer takes what the user was sent, its own prompt among it."""

    def __init__(self, content: str):
        self.content = content


class Score(BaseModel):
    value: str
    explanation: str | None = None


class Store(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)


class AnyName:
    """A class for annotations, and a decorator that changes nothing."""

    def __init__(self, *given: Any, **named: Any): ...

    def __call__(self, decorated: Any) -> Any:
        return decorated

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class ToolError(Exception): ...


def store_as(model: Any, instance: str | None = None) -> Any:
    if model.__name__ not in STORE:
        STORE[model.__name__] = model()
    return STORE[model.__name__]


def decorator(*given: Any, **named: Any) -> Any:
    return given[0] if given and callable(given[0]) else lambda decorated: decorated


class StandIn(ModuleType):
    """A module with every name."""

    known: ClassVar[dict[str, Any]] = {
        "ToolError": ToolError,
        "StoreModel": Store,
        "store_as": store_as,
        "Score": Score,
        "CORRECT": "C",
        "INCORRECT": "I",
        "ChatMessageAssistant": Message,
        "ChatMessageUser": Said,
        "scorer": decorator,
        "solver": decorator,
        "tool": decorator,
        "agent": decorator,
        "accuracy": decorator,
        "stderr": decorator,
        "ChatMessage": Any,
    }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.known.get(name, AnyName)


@contextmanager
def apart() -> Iterator[None]:
    """The package's modules as if never loaded; afterwards as they were."""
    mine = [name for name in sys.modules if name.split(".")[0] in ("inspect_evals", "inspect_ai")]
    before = {name: sys.modules.pop(name) for name in mine}
    bare = ModuleType(PACKAGE)
    bare.__path__ = [str(Path(data_file("telecom", "db.toml")).parents[3])]
    try:
        sys.modules[PACKAGE] = bare
        for name in NAMES:
            sys.modules[f"inspect_ai{name}"] = StandIn(f"inspect_ai{name}")
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("inspect_evals", "inspect_ai")]:
            del sys.modules[name]
        sys.modules.update(before)


@cache
def _modules() -> SimpleNamespace:
    with apart():
        names = ("common.scorer", "telecom.scorer", "telecom.solver", "telecom.environment", "data_model.tasks")
        loaded = {name.replace(".", "_"): importlib.import_module(f"{PACKAGE}.{name}") for name in names}
        agent = importlib.import_module(f"{PACKAGE}.telecom.TelecomAgentTools").TelecomAgentTools
        user = importlib.import_module(f"{PACKAGE}.telecom.TelecomUserTools").TelecomUserTools
    ready = agent(), user()
    for side in ready:
        side.initialize()
    return SimpleNamespace(**loaded, ready=ready)


@cache
def _desks() -> SimpleNamespace:
    """The scorer of retail and airline, with databases that are read once and copied for each use."""
    with apart():
        scorer = importlib.import_module(f"{PACKAGE}.common.scorer")
        opening = importlib.import_module(f"{PACKAGE}.common.dataset").USER_MESSAGE
    for tools in (scorer.RetailAgentTools, scorer.AirlineAgentTools):
        ready = tools()
        ready.initialize()
        tools.initialize = partialmethod(_initialize, ready.db)
    return SimpleNamespace(scorer=scorer, opening=opening)


def _initialize(tools: Any, ready: Any) -> None:
    if not tools.initialized:
        tools.initialized, tools.db = True, ready.model_copy(deep=True)


def desk_verdict(domain: Domain, task: Task, calls: Sequence[ToolCall], said: Sequence[str]) -> bool:
    """Whether the package's scorer of retail or airline is satisfied after these calls and messages to the user."""
    package = _desks()
    STORE.clear()
    tools = (package.scorer.get_retail_tools if domain == "retail" else package.scorer.get_airline_tools)()
    for call in calls:
        with suppress(Exception):  # an error is a reply; two tools have no method, and change nothing
            getattr(tools, call.name)(**call.arguments)
    messages = [package.opening, *map(Said, said)]
    state = SimpleNamespace(metadata={"instance": domain, "task": task}, messages=messages)
    scorers = [package.scorer.db_match(domain=domain), package.scorer.score_communicated_info()]
    return all(asyncio.run(score(state, None)).value == "C" for score in scorers)


def package_verdict(task: Task, calls: Sequence[ToolCall]) -> bool:
    """Whether the package's telecom scorer is satisfied after these calls, made as its tools make them."""
    package = _modules()
    read, environment = package.data_model_tasks.Task.model_validate(task), package.telecom_environment
    agent, user = (side.model_copy(deep=True) for side in package.ready)
    STORE.clear()
    STORE.update(TelecomAgentTools=agent, TelecomUserTools=user)
    world = environment.get_environment()
    for action in read.initial_state.initialization_actions or []:
        package.telecom_solver.perform_action(world, action)
    for call in calls:
        world = environment.get_environment()  # what each tool of the package begins with
        for side in (world.tools, world.user_tools):
            if hasattr(side, call.name):
                with suppress(Exception):  # an error is a reply
                    getattr(side, call.name)(**call.arguments)
    state = SimpleNamespace(metadata={"instance": "telecom", "task": read}, messages=[])
    STORE["StoredAgentState"] = SimpleNamespace(messages=[Message(call) for call in calls])
    state.messages = STORE["StoredAgentState"].messages  # the solo agent is both sides
    scorers = [
        package.common_scorer.evaluate_required_actions(check_reward_basis=True),
        package.telecom_scorer.env_assertions(),
    ]
    return all(asyncio.run(score(state, None)).value == "C" for score in scorers)
