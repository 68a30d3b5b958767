"""The result of a check: pass, warn, fail or skip, one short finding, and a remedy where something must be done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tasks.core.text import first_few, one_line

Result = Literal["pass", "warn", "fail", "skip"]
NEXT_SENTENCE = re.compile(r"(?<=[.)])\s+(?=[A-Z])")


class NotCheckable(Exception):
    """The project has nothing that this check could examine: a warning, no fault. `remedy` says what to do."""

    def __init__(self, message: str, remedy: str):
        super().__init__(message)
        self.remedy = remedy


class Skipped(Exception):
    """What a check needs is missing; the check `cause` gives the reason."""

    def __init__(self, cause: str):
        super().__init__(cause)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Finding:
    result: Result
    text: str
    remedy: str = ""


def passed(text: str) -> Finding:
    return Finding("pass", text)


def warned(text: str, remedy: str) -> Finding:
    return Finding("warn", text, remedy)


def failed(text: str, remedy: str) -> Finding:
    return Finding("fail", text, remedy)


def skipped(cause: str) -> Finding:
    return Finding("skip", f"not looked at, for the reason under `{cause}`")


def of_error(error: Exception) -> Finding:
    """Of a ValueError the first sentence is the finding and the rest the remedy. Any other error is a crash."""
    if isinstance(error, NotCheckable):
        return warned(str(error), error.remedy)
    if not isinstance(error, ValueError):
        said = one_line(f"{type(error).__name__}: {error}")
        return failed(f"the check crashed with {said}", "Run `python -m tasks doctor --debug` for the traceback.")
    found, *rest = NEXT_SENTENCE.split(" ".join(str(error).split()), maxsplit=1)
    return failed(found.rstrip("."), rest[0] if rest else "Correct that and run again.")


def list_some(items: list[str], *, most: int = 3) -> str:
    """A few of the items, each cut to one line, and how many more there are: `a; b and 4 more`."""
    return first_few([one_line(item) for item in items], most, by="; ")
