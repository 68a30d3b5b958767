"""Settings of custom: the class, and the settings of that class."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

from pydantic import create_model, field_validator

from tasks.core.load_object import load_object
from tasks.core.settings import Settings, validate_inside
from tasks.tools.authoring import ToolEnvironment, ToolEpisode
from tasks.tools.base import Environment


class CustomSettings(Settings):
    """`object` is module:class. All other keys belong to the `settings_class` of that class."""

    examples_page: ClassVar[str] = "tasks/custom/README.md"
    object: str

    @field_validator("object")
    @classmethod
    def _check_class(cls, path: str) -> str:
        fault = _fault_of(load_object(path))
        if fault is not None:
            raise ValueError(f"{path} {fault} (tasks/custom/README.md has an example)")
        return path

    @classmethod
    def read(cls, given: Any) -> Settings:
        """Validate against both classes; the user's class receives an instance of its `settings_class`."""
        if isinstance(given, CustomSettings):
            return given
        named = validate_inside(CustomSettings, _of_ours(given) if isinstance(given, dict) else given)
        assert isinstance(named, CustomSettings)
        own: type[Settings] | None = getattr(load_object(named.object), "settings_class", None)
        both = create_model("CustomSettings", __base__=(CustomSettings, own) if own else CustomSettings)
        return validate_inside(both, given)


def _of_ours(given: dict[Any, Any]) -> dict[Any, Any]:
    """`object`, or what looks like a misspelling of it; the other keys cannot be checked before the class is known."""
    names = ["object"] if "object" in given else difflib.get_close_matches("object", map(str, given))
    return {name: value for name, value in given.items() if name in names}


def _fault_of(found: Any) -> str | None:
    """Why this object cannot be the environment, and what to do; None if it can."""
    if not isinstance(found, type) or Environment not in found.__mro__:
        return "is no environment, so there are no tools to call. Name a class derived from ToolEnvironment"
    if not issubclass(found, ToolEnvironment):
        needed = ("start", "tools", "describe", "fingerprint")
        missing = [name for name in needed if getattr(found, name) is getattr(Environment, name)]
        missing += [] if hasattr(found, "from_settings") else ["from_settings"]
        if missing:
            return f"does not define {', '.join(missing)}, so it cannot be played. Derive it from ToolEnvironment"
    elif not isinstance(getattr(found, "name", None), str):
        return "has no name, which the fingerprint of its tools contains. Give the class a text as name"
    elif not _is_class(getattr(found, "episode_class", None), ToolEpisode):
        return "has no episode_class, so there are no tools to call. Set it to a class derived from ToolEpisode"
    elif found.episode_class.verdict is ToolEpisode.verdict:
        return f"has no verdict, so no episode could be judged. Define verdict in {found.episode_class.__name__}"
    own = getattr(found, "settings_class", None)
    if own is not None and not _is_class(own, Settings):
        return f"has settings_class {own!r:.60}, which checks no keys. Set a class derived from Settings, or None"
    if own is not None and "object" in own.model_fields:
        return "has a setting of its own called object, which is the key that names the class. Rename that field"
    return None


def _is_class(found: Any, base: type[Any]) -> bool:
    return isinstance(found, type) and issubclass(found, base)


SETTINGS = CustomSettings
