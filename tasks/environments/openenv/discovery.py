"""What a server offers, asked once when the environment is made: its name, its tools, its splits of tasks."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.core import json_text
from tasks.environments.openenv.messages import (
    STEP,
    TAKES_TOOL_CALLS,
    BadAnswer,
    Offer,
    read,
    read_tools,
    step_tool,
)
from tasks.environments.openenv.servers import Server
from tasks.tools.base import EnvironmentFault, Tool


class _Told(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class Metadata(_Told):
    name: str
    description: str = ""
    version: str | None = None


class Schemas(_Told):
    action: dict[str, Any]


class Split(_Told):
    """A split of tasks; `type` says which half of a published split it is."""

    name: str = Field(min_length=1)
    type: Literal["train", "validation", "test"] = "validation"


class NumTasks(_Told):
    num_tasks: int = Field(ge=0)


async def discover(server: Server) -> Offer:
    """EnvironmentFault if the server says what OpenEnv does not have."""
    try:
        metadata: Metadata = read(Metadata, await server.ask("metadata"), "metadata")
        schemas: Schemas = read(Schemas, await server.ask("schema"), "schemas")
        json_text.check_depth(schemas.action)
        version = metadata.version or ""
        calls_are_steps = schemas.action.get("title") in TAKES_TOOL_CALLS
        tools = await _mcp_tools(server, version, by_step=calls_are_steps)
        if not calls_are_steps:
            tools |= {STEP: step_tool(schemas.action, metadata.description, version)}
    except BadAnswer as error:
        raise EnvironmentFault(f"the server {error}", tool="server") from None
    if not tools:
        raise EnvironmentFault("the server has no tool and no action of its own", tool="server")
    return Offer(metadata.name, version, tools, calls_are_steps)


async def find_splits(server: Server, wanted: list[str]) -> tuple[str, dict[str, tuple[Split, int]]]:
    """(the path of its task API; by name, each wanted split and the number of its tasks). ValueError if one is not
    there.
    """
    try:
        names = await server.ask("list_environments")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise BadAnswer("did not name one environment")
        given = await server.ask(f"{names[0]}/splits")
        if not isinstance(given, list):
            raise BadAnswer("listed no splits")
        splits = {split.name: split for split in (read(Split, item, "a split") for item in given)}
    except (BadAnswer, EnvironmentFault) as error:
        told = error.message if isinstance(error, EnvironmentFault) else f"the server {error}"
        raise ValueError(
            f"environment.settings.splits names {', '.join(wanted)}, and there is no task API to read it from: {told}. "
            f"Set splits to [], and each problem is a seed, or use a server with tasks"
        ) from None
    missing = [name for name in wanted if name not in splits]
    if missing:
        raise ValueError(
            f"environment.settings.splits names {missing[0]!r}, which the server does not have, so there are no tasks "
            f"to play. It has: {', '.join(splits) or 'none'}"
        )
    counted = {}
    for name in wanted:
        given = await server.ask(f"{names[0]}/num_tasks", body={"split": name})
        try:
            counted[name] = (splits[name], read(NumTasks, given, "a number of tasks").num_tasks)
        except BadAnswer as error:
            raise ValueError(
                f"environment.settings.splits: the server {error} for {name!r}, so no task is known"
            ) from None
    return names[0], counted


async def _mcp_tools(server: Server, version: str, *, by_step: bool) -> dict[str, Tool]:
    session, seconds = server.session(), server.seconds
    try:
        await session.open(seconds=seconds)
        if by_step:
            observed = await session.step({"type": "list_tools"}, tool="server", seconds=seconds)
            return read_tools(observed.observation.get("tools"), version)
        answer = await session.ask_mcp("tools/list", {}, tool="server", seconds=seconds)
        result = answer.get("result")
        return read_tools(result.get("tools"), version) if isinstance(result, dict) else {}
    finally:
        await session.close()
