"""The one rich console: tables and colours of ours, text of anybody's.

What it is given is text: brackets are no markup, `:smile:` is no picture, and a control character is shown, wherever
in a table it is (see `terminal.py`). Ours styles with `Text` and `style=`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tasks.core.text import visible


class SafeConsole(Console):
    """A console that takes no orders from the text it shows."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Before the layout, so that widths are of what is shown."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """After it, for a `Text` that somebody made of foreign text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
