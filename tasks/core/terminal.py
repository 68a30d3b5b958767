r"""Output to people: every line, log record and traceback is printed here, with control characters shown as text
(`\x1b`, `\u202e`) and known secrets hidden. tests/contracts/test_terminal.py keeps other modules from printing. Tables
and colours: `console.py`.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import Any

from tasks.core.secrets import hide_known_secrets
from tasks.core.text import visible


def tell(text: str) -> None:
    print(_for_people(text), flush=True)


def warn(text: str) -> None:
    print(_for_people(text), file=sys.stderr, flush=True)


def _for_people(text: str) -> str:
    return visible(hide_known_secrets(text))


def tame_logs_and_tracebacks() -> None:
    """Escape libraries' log records and tracebacks too."""
    logging.setLogRecordFactory(_VisibleRecord)
    sys.excepthook = _show_traceback


class _VisibleRecord(logging.LogRecord):
    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        if self.exc_info and self.exc_info[0]:  # a formatter writes this text where there is one
            self.exc_text = _for_people(_in_words(*self.exc_info))
        if self.stack_info:
            self.stack_info = _for_people(self.stack_info)

    def getMessage(self) -> str:
        return _for_people(super().getMessage())


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    warn(_in_words(kind, error, trace))


def _in_words(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> str:
    return "".join(traceback.format_exception(kind, error, trace)).rstrip("\n")
