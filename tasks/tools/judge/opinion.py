"""What a judge answers: its JSON schema, and the one way from an answer's text to an opinion."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tasks.core import json_text
from tasks.core.text import encodable

FENCE = "```"
MAX_REASON_CHARACTERS = 2000
Share = Annotated[float, Field(ge=0, le=1)]


class Opinion(BaseModel):
    """One vote. The reason comes first, so that a model writes it before it decides."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    reason: str = Field(max_length=MAX_REASON_CHARACTERS)
    success: bool
    score: Share
    soundness: Share


def answer_schema() -> dict[str, Any]:
    """In the subset that every endpoint with strict schemas takes: limits of numbers and texts are checked here."""
    kinds = {"reason": "string", "success": "boolean", "score": "number", "soundness": "number"}
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in kinds.items()},
        "required": list(kinds),
        "additionalProperties": False,
    }


def read_opinion(said: str | None) -> Opinion:
    """ValueError unless it is one JSON object of the schema. The one repair: it may be in a Markdown code block, which
    models add where no schema constrains them.
    """
    value = json_text.parse(encodable(_without_fence(said or "")))
    if isinstance(value, dict) and isinstance(value.get("reason"), str):
        value["reason"] = encodable(value["reason"])[:MAX_REASON_CHARACTERS]
    return Opinion.model_validate(value)


def _without_fence(text: str) -> str:
    """By lines: a regular expression takes minutes for a page of line ends."""
    first, _, rest = text.strip().partition("\n")
    content, _, last = rest.rpartition("\n")
    return content if first.rstrip() in (FENCE, f"{FENCE}json") and last.strip() == FENCE else text
