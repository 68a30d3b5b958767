"""Settings of mixture: the environments in it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from tasks.core.settings import Settings
from tasks.environments.settings import OtherEnvironmentSettings


class MemberSettings(OtherEnvironmentSettings):
    """One environment of a mixture. `label` begins the ids and categories of its problems (null: its name).
    `share` is its part of `curate.num_generated`, relative to the other shares.
    """

    label: str | None = Field(pattern=r"^\w[\w.-]*$")
    share: float = Field(gt=0)

    @property
    def title(self) -> str:
        return self.label or self.name


class MixtureSettings(Settings):
    """The environments that one run trains on."""

    examples_page: ClassVar[str] = "tasks/environments/README.md"
    members: list[MemberSettings] = Field(min_length=1)

    @field_validator("members")
    @classmethod
    def _check_members(cls, members: list[MemberSettings]) -> list[MemberSettings]:
        names, titles = [member.name for member in members], [member.title for member in members]
        twice = sorted({title for title in titles if titles.count(title) > 1})
        if twice:
            raise ValueError(
                f"{', '.join(twice)} is there twice, and a problem is told by the label of its environment, or its "
                f"name. Give each a label of its own, such as label: {twice[0]}-2"
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
