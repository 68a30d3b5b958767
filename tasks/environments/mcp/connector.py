"""A connection to an MCP server: `stdio.py` starts a process, `http.py` uses a URL."""

from __future__ import annotations

from typing import Any, Protocol

MAX_MESSAGE_BYTES = 8 << 20  # per message


class Connector(Protocol):
    """One connection, and its error report afterwards. `folder`: the path of the server's scratch folder
    (`scratch.py`), or empty.
    """

    folder: str

    @property
    def status(self) -> int:
        """The HTTP status of the call's last error, or 0."""
        ...

    def connect(self) -> Any:
        """Async context: the streams of an MCP session."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once no answer can arrive any more."""
        ...

    def forget(self) -> None:
        """Called before each call, in its task: drop earlier errors."""
        ...

    def account(self) -> str:
        """What went wrong, to follow "the server"; empty if unknown."""
        ...

    def last_words(self) -> str:
        """The end of the server's log, if there is one."""
        ...
