r"""What people read at a terminal: every line, log record and traceback goes out here.

All that a terminal would act on is shown instead (`\x1b`, `\u202e`), so no caller has to know which part of a line is
foreign. tests/contracts/test_terminal.py keeps other modules from printing. Tables and colours are in `console.py`.
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
