"""Settings of custom: the class, and the settings of that class."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import create_model, field_validator

from tasks.core.load_object import load_object
from tasks.core.settings import Settings, validate_inside
from tasks.tools.base import Environment


class CustomSettings(Settings):
    """`object` is module:class. All other keys belong to the `settings_class` of that class."""

    examples_page: ClassVar[str] = "tasks/custom/README.md"
    object: str

    @field_validator("object")
    @classmethod
    def _is_an_environment(cls, path: str) -> str:
        found = load_object(path)
        if Environment not in getattr(found, "__mro__", ()):
            raise ValueError(
                f"{path} is no environment, so there are no tools to call. Name a class derived from ToolEnvironment "
                f"(tasks/custom/README.md has an example)"
            )
        return path

    @classmethod
    def read(cls, given: Any) -> Settings:
        """Validate against both classes; the user's class receives an instance of its `settings_class`."""
        if isinstance(given, CustomSettings):
            return given
        of_ours = {name: given[name] for name in given if name == "object"} if isinstance(given, dict) else given
        named = validate_inside(CustomSettings, of_ours)
        assert isinstance(named, CustomSettings)
        own: type[Settings] | None = getattr(load_object(named.object), "settings_class", None)
        both = create_model("CustomSettings", __base__=(CustomSettings, own) if own else CustomSettings)
        return validate_inside(both, given)


SETTINGS = CustomSettings
