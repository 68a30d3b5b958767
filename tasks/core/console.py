"""The one rich console. Its input is text: brackets are no markup, `:smile:` no emoji, and control characters are shown
(see `terminal.py`). Our own styles use `Text` and `style=`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tasks.core.text import visible


class SafeConsole(Console):
    def __init__(self, **options: Any):
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """rich would end the process with status 1; what it means is decided in one place (`cli_errors.py`)."""
        raise  # rich calls this while it handles the error

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape before the layout, so that widths are right."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape after the layout too, for a `Text` made of foreign text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
