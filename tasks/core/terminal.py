r"""What people read at a terminal. Every line, log record and traceback of ours goes out here; foreign text is shown.

Problems, tools, models, servers and files hold whatever their authors wrote: an escape sequence that moves the cursor,
a mark that turns the direction of writing. All that a terminal would act on is shown instead (`\x1b`, `\u202e`), for
every line alike, so that no caller has to know which part of it is foreign. tests/contracts/test_terminal.py keeps
other modules from printing. Left out: tables and colours (`console.py`), and pages, which have jinja2's escapes.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType

from tasks.core.text import visible


def tell(text: str) -> None:
    """A line, or several, on standard output."""
    print(visible(text), flush=True)


def warn(text: str) -> None:
    """A line, or several, on standard error."""
    print(visible(text), file=sys.stderr, flush=True)


def tame_logs_and_tracebacks() -> None:
    """What libraries log in this process, and a traceback that ends it, are foreign text too."""
    logging.setLogRecordFactory(_VisibleRecord)
    sys.excepthook = _show_traceback


class _VisibleRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return visible(super().getMessage())


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    warn("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))
