"""What passes between this process and a worker: JSON in frames of a bounded length, and nothing that is evaluated.

A frame is its length in four bytes, then one JSON object. Arguments are a model's text and replies a tool's, so no
pickle is read; what is too long, or no JSON, ends the worker that sent it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tasks.tools.base import EnvironmentFault, ToolReply, Verdict

MAX_BYTES = 64 << 20  # of one frame; a problem, or a verdict with its details
LENGTH_BYTES = 4


class BadFrame(Exception):
    """What came is no message."""


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
    if isinstance(answer, ToolReply):
        return {"reply": [answer.text, answer.valid, answer.error, answer.num_retries]}
    if isinstance(answer, Verdict):
        return {"verdict": [answer.success, answer.checks, answer.details]}
    return {"done": True}


def error_row(error: BaseException) -> dict[str, Any]:
    if isinstance(error, EnvironmentFault):
        return {"fault": [error.message, error.tool, error.type, error.num_retries]}
    return {"refused" if isinstance(error, ValueError) else "crashed": f"{type(error).__name__}: {error}"}


def read_answer(message: dict[str, Any]) -> ToolReply | Verdict | None:
    """The answer, or its error raised. BadFrame for anything else."""
    try:
        if "reply" in message:
            text, valid, error, num_retries = message["reply"]
            return ToolReply(text, valid, error, num_retries)
        if "verdict" in message:
            return Verdict(*message["verdict"])
        if "fault" in message:
            text, tool, type, num_retries = message["fault"]
            fault = EnvironmentFault(text, tool=tool, type=type)
            fault.num_retries = num_retries
            raise fault
    except (TypeError, ValueError):
        raise BadFrame("its answer is of another shape") from None
    if "refused" in message:
        raise ValueError(str(message["refused"]).removeprefix("ValueError: "))
    if "crashed" in message:
        raise RuntimeError(f"an episode failed in its worker: {message['crashed']}")
    return None
