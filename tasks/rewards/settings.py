"""Settings of the reward."""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from tasks.core.settings import Settings, validate_inside
from tasks.rewards.built_in import BUILT_IN
from tasks.rewards.part_settings import OwnPart, PartSettings

OUTCOME = "outcome"
JUDGED = {"judge", "soundness"}  # parts that read what environment.judge left


def _read_part(given: Any) -> Any:
    """By the keys it has, so that a mistake in a part names the part's own keys."""
    if not isinstance(given, dict):
        return given if isinstance(given, PartSettings) else _refuse(f"it is {json.dumps(given, default=str)[:100]}")
    name = given.get("name")
    if name == OUTCOME:
        raise ValueError("outcome is always there with weight 1, so it is no entry of the list. Leave it out")
    built_in = BUILT_IN.get(name) if isinstance(name, str) else None
    if "function" in given and built_in is not None:
        raise ValueError(f"{name} is a built-in part, so a function of yours needs another name. Rename it")
    if "function" in given or not isinstance(name, str):
        return validate_inside(OwnPart, given) if isinstance(name, str) else _refuse("it has no name")
    if built_in is None:
        near = difflib.get_close_matches(name, BUILT_IN, n=2, cutoff=0.5)
        told = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(BUILT_IN)}."
        raise ValueError(
            f"{name[:40]!r} is no built-in part, so it would score nothing. {told} One of yours has a function such as "
            f"tasks.custom.rewards:score"
        )
    return validate_inside(built_in.settings, given)


def _refuse(what: str) -> Any:
    raise ValueError(f"{what}, and a part is a table. Write it as {{name: format, weight: 0.2}}")


class RewardSettings(Settings):
    """`parts` are added to the outcome, which is 1 for success. `allow_undominated` accepts parts with which a failure
    could outscore a success (`dominance.py`).
    """

    parts: list[Annotated[PartSettings, BeforeValidator(_read_part)]]
    allow_undominated: bool

    @model_validator(mode="after")
    def _refuse_repeated_names(self) -> RewardSettings:
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"two of the parts are named {name!r}, so a trajectory could not say what each was worth. Add "
                    f"their weights, or rename one"
                )
        return self

    def unjudged(self) -> RewardSettings:
        """Without the parts that a judge's opinion is needed for."""
        return self.model_copy(update={"parts": [part for part in self.parts if part.name not in JUDGED]})
