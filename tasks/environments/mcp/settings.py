"""Settings of mcp: the server, its reset between episodes, and the check of success."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from tasks.core.load_object import ObjectPath
from tasks.tools.server_settings import LiteralValue, ServerAddress

SCRATCH = "{scratch}"


class MCPSettings(ServerAddress):
    """An MCP server. Without a `checker`, `environment.judge` decides on success.

    {scratch} in a literal of `environment` or in `command` is the path of an empty folder of the server
    (`scratch.py`).

    `reset` before each episode: start a new `process` with a new folder; empty the folder (`scratch`), for a server
    that keeps its state in files; call `reset_tool` (`tool`); or `none`. At most `max_servers` processes or sessions
    are open.
    """

    operational: ClassVar[set[str]] = {"max_servers", "start_timeout_seconds"}

    allowed_tools: list[str] | None
    reset: Literal["process", "scratch", "tool", "none"]
    reset_tool: str | None
    checker: ObjectPath | None
    max_servers: int = Field(ge=1)
    start_timeout_seconds: float = Field(gt=0)

    @model_validator(mode="after")
    def _check_reset_and_tools(self) -> MCPSettings:
        if self.reset == "process" and self.command is None:
            raise ValueError("reset: process starts a server for each episode, which takes command, not url")
        if self.reset == "scratch" and not self._has_scratch():
            raise ValueError(
                "reset: scratch empties the server's folder between episodes, but the server does not get the folder's "
                'path. Write {scratch} in command or in a literal of environment, such as {value: "{scratch}/data.db"}'
            )
        if (self.reset == "tool") != (self.reset_tool is not None):
            raise ValueError("reset_tool names the tool for reset: tool; with any other reset it is null")
        if self.reset_tool is not None and self.reset_tool in (self.allowed_tools or []):
            raise ValueError("reset_tool is among allowed_tools, so the model could undo its own episode")
        if self.allowed_tools is not None and not self.allowed_tools:
            raise ValueError("allowed_tools is empty, so the model could call nothing; null allows all")
        if len(set(self.allowed_tools or [])) < len(self.allowed_tools or []):
            raise ValueError("allowed_tools names a tool twice; the model would read it twice")
        return self

    def _has_scratch(self) -> bool:
        values = [given.value for given in self.environment.values() if isinstance(given, LiteralValue)]
        return any(SCRATCH in text for text in (*(self.command or []), *values))

    @property
    def instead_of_judge(self) -> str | None:
        """What to do without a judge, where only one can say whether an episode succeeded."""
        return "name a function as settings.checker" if self.checker is None else None


SETTINGS = MCPSettings
