"""Settings of tau2: which problems of the benchmark."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from tasks.core.settings import Settings

Problems = Literal["full", "base", "small"]


class Tau2Settings(Settings):
    """`domain`: telecom is played solo, without a user. `problems`: 2,285 in `full`, 114 in `base`, 20 in `small`."""

    domain: str
    problems: Problems

    @field_validator("domain")
    @classmethod
    def _needs_no_user(cls, domain: str) -> str:
        if domain in ("retail", "airline"):
            raise ValueError(
                f"the problems of {domain} are conversations with a user, and tau2 plays without one, so nobody would "
                f"answer the agent. Set environment.settings.domain to telecom, whose problems are tickets."
            )
        if domain != "telecom":
            raise ValueError(f"tau2 has no domain {domain!r}, so there are no problems. Set it to telecom.")
        return domain


SETTINGS = Tau2Settings
