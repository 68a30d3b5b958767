"""Loads a user's object, which params name as `tasks.custom.module:name`.

Only from tasks/custom: DVC, resume keys and measurement keys watch that folder, so a change elsewhere would be missed.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Annotated, Any

from pydantic import AfterValidator

from tasks.core.text import one_line
from tasks.core.user_code import users_line

PACKAGE = "tasks.custom"


def check_object_path(path: str) -> str:
    """The path. ValueError if it is not written as module:name, or the module is not in tasks/custom. Imports
    nothing.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), name]):
        file, _, rest = path.partition(".py:")
        better = f"{file.replace('/', '.')}:{rest}" if rest else f"{PACKAGE}.module:name"
        raise ValueError(f"{path!r} does not name an object. Write it as {better}")
    if not f"{module_name}.".startswith(f"{PACKAGE}."):
        moved = module_name.rpartition(".")[2]
        raise ValueError(
            f"{path!r} is not in tasks/custom/, the one folder of yours whose changes run the stages again. Move "
            f"the file to tasks/custom/{moved}.py and write {PACKAGE}.{moved}:{name}"
        )
    return path


ObjectPath = Annotated[str, AfterValidator(check_object_path)]


def load_object_of(setting: str, path: str) -> Any:
    """ValueError in one line that names the setting, where params were checked without importing anything."""
    try:
        return load_object(path)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None


def load_object(path: str) -> Any:
    """ValueError in one line if it cannot be loaded."""
    check_object_path(path)
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may do anything on import
        line = users_line(error)
        at = f" at {line}" if line else ""
        raise ValueError(
            f"importing {module_name} failed{at} ({type(error).__name__}: {one_line(str(error))}), so {name} of it "
            f"cannot be used. Correct the name or the module"
        ) from None
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=3, cutoff=0.5)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ValueError(f"there is no {name} in {module_name}{hint}, so it cannot be used. Correct the name")
    return getattr(module, name)
