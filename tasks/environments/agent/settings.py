"""Settings of agent: how it is started, for how long, in which world, and who judges."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from tasks.core.load_object import ObjectPath
from tasks.core.settings import Settings, VariableName
from tasks.environments.settings import EnvironmentSettings, NamedEnvironment
from tasks.tools.server_settings import LiteralValue

VerdictBy = Literal["result", "checker", "http", "judge"]


class WorldSettings(NamedEnvironment):
    """Another environment, whose problems, tools and verdict the agent gets."""

    def within(self, section: EnvironmentSettings) -> EnvironmentSettings:
        """The section with this environment in the place of its own."""
        return section.model_copy(update={"name": self.name, "settings": self.settings})


class VerdictSettings(Settings):
    """Who says whether an agent without a world succeeded: the file that it writes (`result`), a function in
    tasks/custom (`checker`), whoever answers at `url` (`http`), or environment.judge (`judge`).
    """

    by: VerdictBy
    checker: ObjectPath | None
    url: str | None = Field(pattern=r"^https?://")
    timeout_seconds: float = Field(gt=0)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        for by, name in (("checker", "checker"), ("http", "url")):
            if (self.by == by) != (getattr(self, name) is not None):
                raise ValueError(f"by: {by} and {name} belong together; fill in both, or set {name} to null")
        return self


class ErrandSettings(Settings):
    """What an agent without a world is in: no tools, and what the model is told decides nothing."""

    instead_of_judge: ClassVar[str | None] = None


class AgentSettings(Settings):
    """Exactly one of `command`, a program that is started for each episode, and `object`, `tasks.custom.module:name` of
    an async function (task, endpoint). `environment` maps a variable of the program to one of ours that has the
    secret, or to a public value: {value: …}.

    `models`: the names that the agent may ask for; the policy answers to each. `deadline_seconds` are the agent's own,
    without those in which it waits for a turn or a tool of the world. With a `world`, `verdict` is null.
    """

    examples_page: ClassVar[str] = "tasks/environments/agent/README.md"
    drives_itself: ClassVar[bool] = True
    command: list[str] | None
    object: ObjectPath | None
    environment: dict[str, LiteralValue | VariableName]
    models: list[str] = Field(min_length=1)
    deadline_seconds: float = Field(gt=0)
    world: WorldSettings | None
    verdict: VerdictSettings | None

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if (self.command is None) == (self.object is None):
            raise ValueError("set exactly one of command (a program to start) and object (an async function)")
        if self.command is not None and not (self.command and all(self.command)):
            raise ValueError("command is empty or has an empty part; give the program and each argument as one item")
        if self.environment and self.command is None:
            raise ValueError("environment is for a program that command starts; a function has ours")
        return self

    @model_validator(mode="after")
    def _check_verdict(self) -> Self:
        if (self.world is None) == (self.verdict is None):
            raise ValueError(
                "set exactly one of world (its verdict counts) and verdict (of an agent that has its own tools)"
            )
        if self.world is not None and self.world.name in ("agent", "mixture"):
            raise ValueError(f"world.name is {self.world.name}, which is no world to play in. Name another environment")
        return self

    @property
    def members(self) -> list[WorldSettings] | None:
        return None if self.world is None else [self.world]

    @property
    def instead_of_judge(self) -> str | None:
        """What to do without a judge, where only one can say whether an episode succeeded."""
        if self.world is not None:
            way: str | None = getattr(self.world.settings, "instead_of_judge", None)
            return way and way.replace("settings.", "settings.world.settings.")
        is_judged = self.verdict is not None and self.verdict.by == "judge"
        return "set settings.verdict.by to result, checker or http" if is_judged else None


SETTINGS = AgentSettings
