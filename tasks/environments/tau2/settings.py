"""Settings of tau2: which problems of the benchmark."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from tasks.core.settings import Settings

Domain = Literal["telecom", "retail", "airline"]
Problems = Literal["full", "base", "small"]


class Tau2Settings(Settings):
    """`domain`: telecom is played solo; retail and airline are conversations, with `environment.user` as the customer.
    `problems`: of telecom 2,285 in `full`, 114 in `base`, 20 in `small`; retail (114) and airline (50) have `base`.
    """

    domain: Domain
    problems: Problems

    @model_validator(mode="after")
    def _check_problems_of_domain(self) -> Tau2Settings:
        if self.domain != "telecom" and self.problems != "base":
            raise ValueError(
                f"problems: {self.problems} is a list of telecom's, so there would be no problem of {self.domain}. Set "
                f"it to base, which is all of them"
            )
        return self

    @property
    def needs_user(self) -> bool:
        """Whether an episode is a conversation, which begins with the user."""
        return self.domain != "telecom"


SETTINGS = Tau2Settings
