"""What a way to an MCP server is, whichever it is: `stdio.py` starts a process, `mcp/http.py` asks a URL."""

from __future__ import annotations

from typing import Any, Protocol

MAX_MESSAGE_BYTES = 8 << 20  # of one message, on either way


class Connector(Protocol):
    """A way to a server: used for one connection, and asked afterwards what became of it.

    `status` is the HTTP status of the last answer that was an error, or 0; `folder` the path of the server's scratch
    folder (`scratch.py`), or empty.
    """

    status: int
    folder: str

    def connect(self) -> Any:
        """Async context: the streams an MCP session runs on."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once no answer can come any more."""
        ...

    def forget(self) -> None:
        """A call begins: what went wrong before, and is over, has nothing to do with it."""
        ...

    def account(self) -> str:
        """What went wrong, as the end of a sentence that begins with "the server"; empty where that is not known."""
        ...

    def last_words(self) -> str:
        """The end of what the server logged, where we hear that."""
        ...
