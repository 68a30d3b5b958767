"""An MCP server as a process, used over its standard streams, in bounded memory.

The SDK's stdio transport reads lines without a limit and searches the whole buffer again for each 64 kB: with mcp
2.3.0, a reply of 20 MB blocked the event loop for 10 s, one of 100 MB for more than 20 s. Ours refuses a message over
MAX_MESSAGE_BYTES, and a server that prints much else to stdout.

A server gets a minimal environment and its own process group, which is ended with it. If this process is killed, the
server's stdin ends, and the protocol asks it to stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.environments.mcp.connector import MAX_MESSAGE_BYTES
from tasks.environments.mcp.scratch import ScratchRoot, remove
from tasks.environments.mcp.settings import SCRATCH
from tasks.tools.server_settings import inherited_variables

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams
    from mcp.shared.message import SessionMessage

MAX_NOISE_BYTES = 1 << 20  # of stdout lines that are not messages: allows a stray print, not a log
KEPT_STDERR_BYTES = 1 << 14
EXIT_SECONDS = 0.5  # between the end of a server's stdout and its own
GRACE_SECONDS, TERMINATE_SECONDS, KILL_SECONDS = 2.0, 1.0, 2.0
LAST_WORDS_SECONDS = 0.1  # for the last output of an ended server; its children may keep the pipes open
LOOK_AGAIN_SECONDS = 0.01


class StdioConnector:
    """A server process for one connection; it ends with the connection, and its scratch folder is removed."""

    def __init__(
        self, command: Sequence[str], secrets: Mapping[str, str], literals: Mapping[str, str], scratch: ScratchRoot
    ):
        self.command, self.literals, self.scratch = command, literals, scratch
        self.variables = inherited_variables() | dict(secrets)
        self.flaw, self.status, self.folder = "", 0, ""
        self.process: asyncio.subprocess.Process | None = None
        self._is_open = self._is_ending = False
        self._stderr, self._stderr_is_cut = b"", False

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[TransportStreams]:
        import anyio

        try:
            self.process = await self._start()
        except OSError as error:
            self.flaw = self.flaw or f"could not be started: {error.strerror}: {self.command[0]!r}"
            self._remove_folder()
            raise
        arrived, messages = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
        self._is_open = True
        readers = [asyncio.create_task(self._read(arrived)), asyncio.create_task(self._keep_stderr())]
        try:
            async with messages:
                yield messages, _Writer(self.process)
        finally:
            self._is_open = False
            await self._end()
            await asyncio.wait(readers, timeout=LAST_WORDS_SECONDS)
            for reader in readers:
                reader.cancel()
            self._remove_folder()

    @property
    def is_alive(self) -> bool:
        return self._is_open and self.process is not None and self.process.returncode is None

    def forget(self) -> None:
        """Over stdio, every error is final."""

    def account(self) -> str:
        return self.flaw

    def last_words(self) -> str:
        lines = self._stderr.decode(errors="replace").splitlines()
        return "\n".join(lines[self._stderr_is_cut :])  # half a line may contain half a secret, which is not recognised

    async def _start(self) -> asyncio.subprocess.Process:
        if any(SCRATCH in text for text in (*self.command, *self.literals.values())):
            self._make_folder()
        literals = {name: value.replace(SCRATCH, self.folder) for name, value in self.literals.items()}
        return await asyncio.create_subprocess_exec(
            *(part.replace(SCRATCH, self.folder) for part in self.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.variables | literals,
            limit=MAX_MESSAGE_BYTES,
            start_new_session=True,
        )

    def _make_folder(self) -> None:
        try:
            self.folder = str(self.scratch.make())
        except OSError as error:
            self.flaw = f"could not be given a scratch folder: {error.strerror}: {error.filename}"
            raise

    def _remove_folder(self) -> None:
        """Only once the process is gone: it could write again."""
        if self.folder:
            remove(Path(self.folder))

    async def _read(self, arrived: Any) -> None:
        """Pass on messages until stdout closes or one is invalid; then kill the server: it cannot answer."""
        import anyio

        async with arrived:
            try:
                await self._hand_on(arrived)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # the session is gone
            self._is_open = False
            is_its_own_doing = not self._is_ending
        if is_its_own_doing:
            self.flaw = self.flaw or await self._way_it_went()
            self._signal(signal.SIGKILL)

    async def _hand_on(self, arrived: Any) -> None:
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        assert self.process is not None
        assert self.process.stdout is not None
        num_noise_bytes = 0
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:  # longer than the stream's limit
                self.flaw = f"sent a message of more than {MAX_MESSAGE_BYTES >> 20} MB and was stopped"
                return
            if not line:
                return
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                num_noise_bytes += len(line)
                if num_noise_bytes > MAX_NOISE_BYTES:
                    self.flaw = "floods its stdout with what is no MCP message and was stopped"
                    return
                await asyncio.sleep(0)
                continue
            await arrived.send(SessionMessage(message))

    async def _keep_stderr(self) -> None:
        """Read all of it, so that the server never blocks, and keep the end."""
        assert self.process is not None
        assert self.process.stderr is not None
        while piece := await self.process.stderr.read(1 << 16):
            whole = self._stderr + piece
            self._stderr_is_cut = self._stderr_is_cut or len(whole) > KEPT_STDERR_BYTES
            self._stderr = whole[-KEPT_STDERR_BYTES:]
            await asyncio.sleep(0)

    async def _way_it_went(self) -> str:
        if not await self._has_ended(EXIT_SECONDS):
            return "closed its stdout and was stopped"
        assert self.process is not None
        assert self.process.returncode is not None
        status = self.process.returncode
        return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"

    async def _end(self) -> None:
        """Close stdin and wait; then SIGTERM; then SIGKILL, to the whole process group."""
        assert self.process is not None
        assert self.process.stdin is not None
        self._is_ending = True
        self.process.stdin.close()
        if not await self._has_ended(GRACE_SECONDS):
            self._signal(signal.SIGTERM)
            await self._has_ended(TERMINATE_SECONDS)
        self._signal(signal.SIGKILL)
        await self._has_ended(KILL_SECONDS)

    async def _has_ended(self, seconds: float) -> bool:
        """Polls the status, since `wait` also waits for pipes, which a child of the process may keep open."""
        assert self.process is not None
        for _ in range(int(seconds / LOOK_AGAIN_SECONDS)):
            if self.process.returncode is not None:
                return True
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        return False

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _Writer:
    """The server's stdin as a session's stream. Never waits: a call has its own time limit."""

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin is not None
        self._stdin = process.stdin

    async def send(self, item: SessionMessage, /) -> None:
        import anyio

        if self._stdin.is_closing():
            raise anyio.ClosedResourceError
        self._stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

    async def aclose(self) -> None:
        """Whoever started the process ends it."""

    async def __aenter__(self) -> _Writer:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
