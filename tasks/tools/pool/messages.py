"""What passes between this process and a worker: JSON in frames of a bounded length, and nothing that is evaluated.

A frame is its length in four bytes, then one JSON object. Arguments are a model's text and replies a tool's, so no
pickle is read; what is too long, or no JSON, ends the worker that sent it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from tasks.core import json_text
from tasks.tools.base import EnvironmentFault, ErrorType, FaultType, ToolReply, Verdict
from tasks.tools.checks import fault_of

MAX_BYTES = 64 << 20  # of one frame; a problem, or a verdict with its details
LENGTH_BYTES = 4
ANSWERED_BY = {"call": "reply", "malformed_call": "reply", "verdict": "verdict"}  # other steps: done
SHAPES: dict[str, TypeAdapter[Any]] = {
    "reply": TypeAdapter(tuple[str, bool, ErrorType | None, NonNegativeInt]),
    "verdict": TypeAdapter(tuple[bool, dict[str, bool], dict[str, Any]]),
    "fault": TypeAdapter(tuple[str, str, FaultType, NonNegativeInt]),
}


class BadFrame(ValueError):
    """What came is no message, or no answer to what was asked."""


def frame(message: dict[str, Any]) -> bytes:
    """ValueError if it is too long, or no JSON."""
    try:
        text = json.dumps(message).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text):,} bytes, more than the limit of {MAX_BYTES:,}")
    return len(text).to_bytes(LENGTH_BYTES, "big") + text


class Frames:
    """Messages out of pieces of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def take(self, piece: bytes) -> Iterator[dict[str, Any]]:
        self._rest += piece
        while len(self._rest) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._rest[:LENGTH_BYTES], "big")
            if end > LENGTH_BYTES + MAX_BYTES:
                raise BadFrame("it announces a message beyond the limit")
            if len(self._rest) < end:
                return
            text = bytes(self._rest[LENGTH_BYTES:end])
            del self._rest[:end]
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                raise BadFrame("its message is no JSON") from None
            if not isinstance(message, dict):
                raise BadFrame("its message is no object")
            yield message


def answer_row(answer: ToolReply | Verdict | None) -> dict[str, Any]:
    """BadFrame where it has other types than it declares; ValueError for details that are no JSON."""
    if isinstance(answer, ToolReply):
        return {"reply": _checked("reply", [answer.text, answer.valid, answer.error, answer.num_retries])}
    if isinstance(answer, Verdict):
        return {"verdict": _checked("verdict", [answer.success, answer.checks, json_text.plain(answer.details)])}
    return {"done": True}


def error_row(error: BaseException) -> dict[str, Any]:
    if isinstance(error, Exception) and (fault := fault_of(error)) is not None:
        return {"fault": [fault.message, fault.tool, fault.type, fault.num_retries]}
    return {"refused" if isinstance(error, ValueError) else "crashed": f"{type(error).__name__}: {error}"}


def read_answer(message: dict[str, Any], step: str) -> ToolReply | Verdict | None:
    """The answer to a question that asked for `step`, or its error raised. BadFrame for anything else."""
    expected = ANSWERED_BY.get(step, "done")
    if expected in message:
        if expected == "done":
            return None
        row = _checked(expected, message[expected])
        return ToolReply(*row) if expected == "reply" else Verdict(*row)
    if "fault" in message:
        text, tool, type, num_retries = _checked("fault", message["fault"])
        fault = EnvironmentFault(text, tool=tool, type=type)
        fault.num_retries = num_retries
        raise fault
    if "refused" in message:
        raise ValueError(str(message["refused"]).removeprefix("ValueError: "))
    if "crashed" in message:
        raise RuntimeError(f"an episode failed in its worker: {message['crashed']}")
    raise BadFrame(f"it has no answer to {step}")


def _checked(kind: str, row: Any) -> tuple[Any, ...]:
    try:
        return SHAPES[kind].validate_python(tuple(row) if isinstance(row, list) else row, strict=True)
    except ValidationError as error:
        raise BadFrame(f"its {kind} is of another shape: {error.errors()[0]['msg']}") from None
