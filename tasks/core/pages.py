"""HTML pages: one stylesheet, one base template, and values that are always text, never markup.

A page's template extends `templates/base.html.jinja` and is in the `templates/` folder beside its code. Every page is
one file that opens from disk: inline styles, no script, nothing from the network; its content policy enforces that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.text import HALF_A_PAIR, encodable

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
STYLE = TEMPLATES / "style.css"
# Tags spell the region of a flag, as of Scotland; anywhere else they are text that no screen shows.
FLAG = "\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f"
# Controls (C0 but tab and newline, DEL, C1), bidirectional formatting, which reorders text, and what has no shape.
# Joiners and the selectors of emoji stay, since scripts and emoji need them.
HIDDEN = re.compile(
    f"{FLAG}|[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
# The same in JSON text, where C0 controls are escaped.
HIDDEN_IN_JSON = re.compile(rf"\\u00|\\[bfr]|{HIDDEN.pattern}|{HALF_A_PAIR.pattern}")


def render(
    folder: Path, name: str, /, *, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """The page from template `name` in `folder`; a missing value is an error."""
    return _environment(folder, tuple((filters or {}).items())).get_template(name).render(values) + "\n"


@cache
def _environment(folder: Path, filters: tuple[tuple[str, Callable[..., Any]], ...]) -> jinja2.Environment:
    """Its templates are compiled once."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Runs on every value before escaping, so no template can forget it.
        finalize=lambda value: page_text(value) if type(value) is str else value,
    )
    environment.filters.update({"percent": percent, "count": count, "breakable": breakable, **dict(filters)})
    return environment


def page_text(text: str) -> str:
    """`text` with lone surrogates, controls, reordering marks and invisible characters replaced by visible signs."""
    text = encodable(text.replace("\r\n", "\n"))
    return HIDDEN.sub(lambda found: found[0] if len(found[0]) > 1 else f"⟨U+{ord(found[0]):04X}⟩", text)


def percent(share: float) -> str:
    return f"{share:.1%}"


def count(number: int) -> str:
    return f"{number:,}"


def breakable(name: str) -> list[str]:
    """`quote/timeout/check_card` in pieces, between which a narrow column may break."""
    return [part for part in re.findall(r"[^/_.]*[/_.]?", name) if part]
