"""Loads an object that params name as `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from tasks.core.text import one_line
from tasks.core.user_code import users_line


def load_object(path: str) -> Any:
    """ValueError in one line if it cannot be loaded. Modules in the current folder are found too."""
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), name]):
        file, _, rest = path.partition(".py:")
        better = f"{file.replace('/', '.')}:{rest}" if rest else "package.module:name"
        raise ValueError(f"{path!r} does not name an object. Write it as {better}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may do anything on import
        line = users_line(error)
        at = f" at {line}" if line else ""
        raise ValueError(
            f"importing {module_name} failed{at} ({type(error).__name__}: {one_line(str(error))}), so {name} of it "
            f"cannot be used. Correct the name or the module; modules are found from the project's root"
        ) from None
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=3, cutoff=0.5)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ValueError(f"there is no {name} in {module_name}{hint}, so it cannot be used. Correct the name")
    return getattr(module, name)
