"""Pages for people: one stylesheet, one base template, and values that always come out as text, never as markup.

A page's template is in the `templates/` folder beside the code that fills it and extends `templates/base.html.jinja`.
Every page is one file that opens from disk: styles inline, no script, nothing from the network, which its content
policy enforces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.core.text import HALF_A_PAIR, encodable

TEMPLATES = Path(__file__).parent / "templates"
STYLE = TEMPLATES / "style.css"
# Controls (C0 but tab and newline, DEL, C1) and the marks that reorder text to the eye (bidirectional formatting).
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# The same in JSON text, where C0 controls are escaped.
HIDDEN_IN_JSON = re.compile(rf"\\u00|\\[bfr]|{HIDDEN.pattern}|{HALF_A_PAIR.pattern}")


def render(
    folder: Path, name: str, /, *, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """The page that the template `name` of `folder` makes of `values`; a value that it lacks is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Runs on every value before it is escaped, so no expression in a template can forget it.
        finalize=lambda value: page_text(value) if type(value) is str else value,
    )
    environment.filters.update({"percent": percent, "count": count, "breakable": breakable, **(filters or {})})
    return environment.get_template(name).render(values) + "\n"


def page_text(text: str) -> str:
    """`text` with lone surrogates, control characters and reordering marks replaced by what shows they were there."""
    text = encodable(text.replace("\r\n", "\n"))
    return HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def percent(share: float) -> str:
    return f"{share:.1%}"


def count(number: int) -> str:
    return f"{number:,}"


def breakable(name: str) -> list[str]:
    """`quote/timeout/check_card` in pieces a narrow column may break between."""
    return [part for part in re.findall(r"[^/_.]*[/_.]?", name) if part]
