"""Settings of openenv: the server, where its problems come from, and how its rewards become a verdict."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from tasks.core.load_object import ObjectPath
from tasks.tools.server_settings import ServerAddress

PORT = "{port}"


class OpenEnvSettings(ServerAddress):
    """An OpenEnv server. {port} in `command` is a free port of this machine.

    Problems: the tasks of `splits`, by the server's task API; with no split a problem is a seed. Their request is
    `instructions`, then the field `request` of the first observation (null: all of it). `solution` is a function of
    yours that solves a task; null: nobody knows a solution.

    An episode succeeds if its reward is at least `success_reward`: the `last` one the server gave, or their `sum`.

    At most `max_servers` processes are started (1 with a `url`), of `max_sessions` episodes each; of those that end by
    themselves, `max_restarts` are replaced.
    """

    operational: ClassVar[set[str]] = {"max_servers", "max_sessions", "max_restarts", "start_timeout_seconds"}

    splits: list[str]
    instructions: str | None
    request: str | None
    solution: ObjectPath | None
    reward: Literal["last", "sum"]
    success_reward: float = Field(allow_inf_nan=False)
    max_servers: int = Field(ge=1)
    max_sessions: int = Field(ge=1)
    max_restarts: int = Field(ge=0)
    start_timeout_seconds: float = Field(gt=0)

    @model_validator(mode="after")
    def _check_command_and_splits(self) -> OpenEnvSettings:
        if self.command is not None and not any(PORT in part for part in self.command):
            raise ValueError(
                f"command does not contain {PORT}, so the server would not listen where it is looked for. Write it "
                f"where the server takes its port, such as [python, -m, my_env.server.app, --port, '{PORT}']"
            )
        if self.url is not None and self.max_servers != 1:
            raise ValueError("max_servers is for servers that command starts; with url it is 1")
        if len(set(self.splits)) < len(self.splits):
            raise ValueError("splits names a split twice, so its tasks would be two problems each")
        return self


SETTINGS = OpenEnvSettings
