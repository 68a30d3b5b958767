"""Where a user's own code failed, for a message without a traceback."""

from __future__ import annotations

import inspect
import site
import sysconfig
import traceback
from pathlib import Path
from typing import Any

OURS = Path(__file__).parents[1]
CUSTOM = OURS / "custom"
INSTALLED = {*map(Path, site.getsitepackages()), *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))}


def users_line(error: BaseException) -> str:
    """The last line of the traceback in the user's files, as `tasks/custom/shop.py:31`; "" where there is none."""
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((Path(error.filename), error.lineno))
    for file, line in reversed(places):
        if _is_of_the_user(file):
            return _place(file, line)
    return ""


def is_raised_by_us(error: BaseException) -> bool:
    """Whether its message is turnwise's own."""
    *_, last = traceback.extract_tb(error.__traceback__)
    file = Path(last.filename)
    return file.is_relative_to(OURS) and not file.is_relative_to(CUSTOM)


def place_of(function: Any) -> str:
    """Where a function is defined, in the same form; its name where nobody knows."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _place(Path(code.co_filename), code.co_firstlineno) if code else str(function.__qualname__)


def _place(file: Path, line: int | None) -> str:
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{line}"


def _is_of_the_user(file: Path) -> bool:
    if file.is_relative_to(CUSTOM):
        return True
    return file.is_absolute() and not any(file.is_relative_to(folder) for folder in (OURS, *INSTALLED))
