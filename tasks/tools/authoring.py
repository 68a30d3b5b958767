"""What an environment is written with: an episode class whose methods are tools, and a class that starts its episodes.

    class ShopEpisode(ToolEpisode):
        @tool("Units of a product on the shelf.", read_only=True)
        def count(self, product: Literal["bolt", "nut"]) -> dict[str, int]: ...

        def verdict(self, final_message): ...

    class Shop(ToolEnvironment):
        name, episode_class = "shop", ShopEpisode

A method's signature gives the JSON Schema, with annotations as pydantic reads them, and its arguments are what is
annotated. A method returns text or JSON, raises ToolError for a wrong call, and may be `async def` or `blocking=True`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field
from pydantic.fields import FieldInfo

from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.core.settings import Settings
from tasks.tools.base import Answer, Environment, ErrorType, Tool, ToolReply, Verdict
from tasks.tools.layer import BoundTool, Kind, ToolLayer, envelope
from tasks.tools.settings import IN_MEMORY, ToolSettings
from tasks.tools.signatures import read_signature

Method = TypeVar("Method", bound=Callable[..., Any])
MARK = "tool_of_turnwise"  # the attribute of a method that is a tool


def tool(
    description: str,
    *,
    read_only: bool = False,
    idempotent: bool = False,
    stateless: bool = False,
    blocking: bool = False,
    version: str = "1",
) -> Callable[[Method], Method]:
    """Make a method of an episode class a tool; `base.Tool` explains the flags."""
    if not isinstance(description, str):
        raise TypeError(
            '@tool stands alone, so the model would not learn what the tool does. Write @tool("what it does")'
        )

    def mark(method: Method) -> Method:
        kind: Kind = "async" if inspect.iscoroutinefunction(method) else "blocking" if blocking else "memory"
        flags = {"read_only": read_only, "idempotent": idempotent, "stateless": stateless, "version": version}
        setattr(method, MARK, (description, kind, flags))
        return method

    return mark


def one_of(values: Iterable[str]) -> FieldInfo:
    return Field(json_schema_extra={"enum": list(values)})


class ToolEpisode:
    """An episode whose tools are its methods. `__init__` builds its state from `problem.world`."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.layer = _layer(type(self), IN_MEMORY)  # type: ignore[arg-type]  # classes are hashable

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        return self.layer.call(self, name, arguments)

    def malformed_call(self) -> ToolReply:
        return self.layer.malformed_call()

    def end_turn(self, message: str | None) -> None:
        """Nothing to do by default."""

    def verdict(self, final_message: str | None) -> Verdict:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to release by default."""

    validation: ClassVar[Literal["reject", "report"]] = "reject"

    @staticmethod
    def word_error(type: ErrorType, tool: str, message: str) -> str:
        """The text of an error reply. Override it only if the model cannot read the envelope."""
        return envelope(type, tool, message)


class ToolEnvironment(Environment):
    """An environment in this process, with the tools of `episode_class`.

    Raise `version` or `seed_scheme` when the same problem plays differently. `data` (what else replies depend on) and
    the versions of `packages` are part of the fingerprint.
    """

    name: str
    episode_class: ClassVar[type[ToolEpisode]]
    version: ClassVar[str] = "1"
    seed_scheme: ClassVar[str] = "none"
    data: ClassVar[Any] = None
    packages: ClassVar[tuple[str, ...]] = ()
    settings_class: ClassVar[type[Settings] | None] = None  # for a class in tasks/custom: its keys beside `object`

    def __init__(self, limits: ToolSettings = IN_MEMORY, settings: Settings | None = None):
        self.limits, self.settings = limits, settings
        self.layer = _layer(self.episode_class, limits)  # type: ignore[arg-type]

    @classmethod
    def from_settings(cls, settings: Any, tools: ToolSettings) -> Self:
        return cls(tools, settings)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.layer.tools

    def start(self, problem: Problem, *, stream: str = "") -> ToolEpisode:
        episode = self.make_episode(problem)
        episode.layer = self.layer
        return episode

    def make_episode(self, problem: Problem) -> ToolEpisode:
        """Override it if an episode needs more than its problem, such as `self.settings`."""
        return self.episode_class(problem)

    def describe(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "environment": {"name": self.name, "version": self.version, "seed_scheme": self.seed_scheme},
            "packages": {package: version(package) for package in self.packages},
            "data": json_hash(self.data),
            "tools": {tool.name: describe_tool(tool) for tool in self.tools},
            **({"settings": self.settings.model_dump(mode="json")} if self.settings is not None else {}),
        }

    def fingerprint(self) -> str:
        return json_hash(self.describe())


def describe_tool(tool: Tool) -> dict[str, Any]:
    """Everything about a tool that could change what an agent learns."""
    return {
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "output_schema": dict(tool.output_schema) if tool.output_schema is not None else None,
        "read_only": tool.read_only,
        "idempotent": tool.idempotent,
        "stateless": tool.stateless,
        "version": tool.version,
    }


@cache
def _layer(episode_class: type[ToolEpisode], settings: ToolSettings) -> ToolLayer:
    methods = {name: item for cls in reversed(episode_class.__mro__) for name, item in vars(cls).items()}
    # A staticmethod does not have the marks of its function; it is refused with the other signatures.
    marked = [
        item for item in methods.values() if any(hasattr(it, MARK) for it in (item, getattr(item, "__func__", 0)))
    ]
    return ToolLayer(
        [_bind(method) for method in marked],
        settings,
        validation=episode_class.validation,
        wording=episode_class.word_error,
    )


def _bind(method: Callable[..., Any]) -> BoundTool:
    parameters, handler = read_signature(method)
    description, kind, flags = getattr(method, MARK)
    return BoundTool(Tool(method.__name__, description, parameters, **flags), handler, kind)
