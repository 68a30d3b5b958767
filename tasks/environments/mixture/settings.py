"""Settings of mixture: the environments in it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from tasks.core.settings import Settings
from tasks.environments.settings import OtherEnvironmentSettings


class MemberSettings(OtherEnvironmentSettings):
    """One environment of a mixture. `share` is its part of `curate.num_generated`, relative to the other shares."""

    share: float = Field(gt=0)


class MixtureSettings(Settings):
    """The environments that one run trains on."""

    examples_page: ClassVar[str] = "tasks/environments/README.md"
    members: list[MemberSettings] = Field(min_length=1)

    @field_validator("members")
    @classmethod
    def _differ(cls, members: list[MemberSettings]) -> list[MemberSettings]:
        names = [member.name for member in members]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"{', '.join(twice)} is there twice, and a problem is told by the name of its environment. Name each "
                f"environment once; the settings of some take several categories"
            )
        if "agent" in names:
            raise ValueError(
                "an agent drives its episodes itself, and those of a mixture are played by our own loop. Train it "
                "alone, by environment.name: agent"
            )
        if "mixture" in names:
            raise ValueError("a mixture cannot be in a mixture. Name its members here instead")
        return members


SETTINGS = MixtureSettings
