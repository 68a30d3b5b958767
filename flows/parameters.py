"""The parameters of the flows, as Prefect's form shows them; their descriptions are in the flows' docstrings."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema

from tasks.commands.profile import PROFILES
from tasks.core.text import one_line
from tasks.tracking.journal import MAX_REASON

AS_IT_IS = "params.yaml"  # no profile: the values that are in the file


def profile_names() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def _check_profile(name: str) -> str:
    if name != AS_IT_IS and name not in profile_names():
        raise ValueError(f"{name!r} is not a profile. Choose {AS_IT_IS}, or one of {', '.join(profile_names())}")
    return name


def _join_lines(text: str) -> str:
    return one_line(text, MAX_REASON + 1)  # what is too long is refused, not cut


Profile = Annotated[
    str, AfterValidator(_check_profile), Field(json_schema_extra={"enum": [AS_IT_IS, *profile_names()]})
]
Reason = Annotated[str, AfterValidator(_join_lines), Field(max_length=MAX_REASON)]
Hidden = Annotated[bool, SkipJsonSchema()]  # for callers in code; a form does not show it
Source = Annotated[str, Field(min_length=1, pattern=r"^[^-]")]  # a leading dash would be read as an option
