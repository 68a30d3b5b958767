"""Settings of a simulated user."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tasks.core.settings import Settings, VariableName
from tasks.core.urls import EndpointUrl
from tasks.tools.settings import check_in_process

Reveal = Literal["at_once", "sharded", "on_request"]


class UserModelSettings(Settings):
    """The model that plays a user: at an OpenAI-compatible endpoint, or (`url` null) a folder on this machine, in
    process, which reads neither `max_retries` nor `timeout_seconds`.

    `model` is its name there, or the folder. `api_key_variable` names the environment variable with the key (null: no
    key). `instructions` null: the environment's own guidelines take the place of turnwise's. `greeting` is what the
    agent is taken to have said before the first message. `max_messages` counts all messages of the user; the next would
    be its farewell.
    """

    url: EndpointUrl | None
    model: str = Field(min_length=1)
    api_key_variable: VariableName | None
    instructions: str | None = Field(min_length=1)
    greeting: str = Field(min_length=1)
    temperature: float = Field(ge=0)
    max_output_tokens: int = Field(ge=1)
    max_messages: int = Field(ge=1)
    max_retries: int = Field(ge=0)
    timeout_seconds: float = Field(gt=0)

    @model_validator(mode="after")
    def _check_model_in_process(self) -> UserModelSettings:
        if self.url is None:
            check_in_process(self.model, api_key_variable=self.api_key_variable)
        return self


class UserSettings(Settings):
    """Who speaks to the agent (`played_by`), and how much of a request each message tells (`reveal`).

    `script` needs no model: the requests as they are, or their parts as the problem or the environment cuts them.
    """

    played_by: Literal["script", "endpoint", "base"]
    reveal: Reveal
    model: UserModelSettings | None

    def refuse_telling_in_parts(self, setting: str, *, plain: str) -> None:
        """ValueError where the environment's guidelines say how much to tell, and `setting` would have no effect."""
        if self.model is not None and self.model.instructions is None:
            raise ValueError(
                f"{setting} has no effect where user.model.instructions is null: the environment's own guidelines say "
                f"how much each message tells. Write instructions, or set {setting} to {plain}"
            )

    @model_validator(mode="after")
    def _check_reveal(self) -> UserSettings:
        if self.reveal != "at_once":
            self.refuse_telling_in_parts("user.reveal", plain="at_once")
        return self

    @model_validator(mode="after")
    def _check_model(self) -> UserSettings:
        if (self.model is None) != (self.played_by == "script"):
            needs = "needs none" if self.played_by == "script" else "needs to know which"
            raise ValueError(
                f"played_by: {self.played_by} {needs}, so no user could speak as configured. Set model to "
                f"{'null' if self.played_by == 'script' else 'a section such as tasks/tools/user/README.md shows'}"
            )
        if self.model is not None and (self.model.url is None) != (self.played_by == "base"):
            raise ValueError(
                f"played_by: {self.played_by} and model.url: {self.model.url} contradict each other, so it is unclear "
                f"which model speaks. Set url to {'null' if self.played_by == 'base' else 'that of the endpoint'}"
            )
        return self
