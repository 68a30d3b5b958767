"""Where the server of an environment is (`mcp`, `openenv`): a command that starts it or a URL, and its secrets."""

from __future__ import annotations

import os
from typing import Any

from pydantic import ValidationInfo, field_validator, model_validator

from tasks.core.secrets import Secrets, read_secret
from tasks.core.settings import Settings, is_variable_name

INHERITED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")  # of our variables, by a server


class LiteralValue(Settings):
    """A value written in params, where everybody can read it: never a secret."""

    value: str


class ServerAddress(Settings):
    """Exactly one of `command` and `url`.

    `environment` and `headers` map a name that the server reads to a variable of ours that contains the secret;
    `environment` also takes public values: {value: …}.
    """

    command: list[str] | None
    url: str | None
    environment: dict[str, str | LiteralValue]
    headers: dict[str, str]

    @field_validator("environment", "headers", mode="before")
    @classmethod
    def _check_names_of_variables(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse other values without printing them: one may be a secret."""
        may_be_literal = info.field_name == "environment"
        for name, value in given.items() if isinstance(given, dict) else ():
            is_literal = may_be_literal and isinstance(value, dict) and value.keys() == {"value"}
            is_literal = is_literal and isinstance(value["value"], str)
            if not (is_variable_name(value) or is_literal or isinstance(value, LiteralValue)):
                other = '; a value that is not secret may be written as {value: "…"}' if may_be_literal else ""
                raise ValueError(
                    f"{name} must be the name of an environment variable, in capitals such as SHOP_API_KEY (the value "
                    f"is not shown, in case it is a secret). Export the value as an environment variable, and write "
                    f"the variable's name{other}"
                )
        return given

    @model_validator(mode="after")
    def _check_address(self) -> ServerAddress:
        if (self.command is None) == (self.url is None):
            raise ValueError("set exactly one of command (a program to start) and url; the other is null")
        if self.command is not None and not (self.command and all(self.command)):
            raise ValueError("command is empty or has an empty part; give the program and each argument as one item")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; the server is reached at http:// or https://")
        if self.environment and self.command is None:
            raise ValueError("environment is for a server that command starts; use headers with url")
        if self.headers and self.url is None:
            raise ValueError("headers are for a server at url; use environment with command")
        return self

    def literals(self) -> dict[str, str]:
        return {name: given.value for name, given in self.environment.items() if isinstance(given, LiteralValue)}

    def read_secrets(self) -> tuple[dict[str, str], dict[str, str], Secrets]:
        """(variables of the server, headers, what hides both). ValueError if a variable of ours is not set."""
        named = {name: given for name, given in self.environment.items() if not isinstance(given, LiteralValue)}
        variables, headers = (
            {
                name: read_secret(variable, setting=f"environment.settings.{part}.{name}")
                for name, variable in given.items()
            }
            for part, given in (("environment", named), ("headers", self.headers))
        )
        return variables, headers, Secrets([*variables.values(), *headers.values()])


def inherited_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in INHERITED if name in os.environ}
