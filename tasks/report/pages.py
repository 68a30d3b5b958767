"""Pages from templates: whatever a value holds, it comes out as text that shows, never as markup."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.report.script_files import visible

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES = Path(__file__).parent / "templates"


def page_template(name: str, filters: Mapping[str, Callable[..., Any]]) -> Template:
    """The template of that name in `templates/`; a name that a page leaves undefined is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Runs on every value before it is escaped, so no expression in a template can forget it.
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters.update(breakable=breakable, **filters)
    return environment.get_template(name)


def breakable(name: str) -> list[str]:
    """`quote/timeout/check_card` in pieces a narrow column may break between."""
    return [part for part in re.findall(r"[^/_.]*[/_.]?", name) if part]
