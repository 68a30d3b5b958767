"""One process that loads heavy libraries once and forks every command that asks (`forked.py`): torch, transformers and
DVC take seconds to import, and a flow starts a dozen processes. Linux alone.

    python -m tasks.core.fork_server LISTENER MODULE [COMMAND …]

LISTENER is the file descriptor of a Unix socket that listens; `MODULE.load(command)` imports what a command needs, a
library at a step, and says at its end whether what is loaded suits it. Each COMMAND, such as `tasks assess`, is
expected: while nobody asks, what it needs is loaded ahead, and who asks waits for one library at most.

A fork begins as a new process would: with the asker's environment, folder, standard streams and ignored signals, a
session of its own, and no module of turnwise loaded, so that it runs the source as it is now. An asker whose
environment differs in what libraries read when they are loaded is refused, and any while this process has threads that
a fork would lose; who is refused starts in the usual way.

A line on standard output tells which command was forked, or why it was refused.

An asker that dies takes its fork with it; what it is told to do (SIGTERM, Ctrl-C) the fork's whole group is told, also
while this process loads something. The end is reported once the group is gone. SIGTERM ends this process after its last
fork; killed, it takes them with it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, cast

from tasks.core.fork_request import REFUSED, Request, differs, receive
from tasks.core.forked import PASSED_ON
from tasks.core.forks import Fork, become, has_other_threads
from tasks.core.quick_exit import prepare_quick_exit, quick_exit
from tasks.core.terminal import tell

LOOK_SECONDS = 0.02


class Recipe(Protocol):
    def load(self, command: Sequence[str]) -> Generator[None, None, bool]: ...


class Server:
    def __init__(self, listener: socket.socket, recipe: Recipe, expected: Sequence[Sequence[str]]):
        self.listener, self.recipe, self.expected, self.forks = listener, recipe, list(expected), list[Fork]()
        self.environment, self.folder, self.pid = dict(os.environ), os.getcwd(), os.getpid()
        self.ahead: Generator[None, None, bool] | None = None  # of the first expected command, under way
        self.num_frozen = 0  # modules
        self.wakes, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.is_ending = self.is_loading = False
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, self._look_after_forks)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)

    def serve(self) -> Request:
        """Until the end of this process; gives what to run in each fork of it."""
        while True:
            has_ended_one = any(fork.status is not None for fork in self.forks)
            is_asked = self._attend(0 if self.expected else LOOK_SECONDS if has_ended_one else None)
            if is_asked and (asked := self._answer()) is not None:
                return asked
            if self.expected and not is_asked:
                self._load_ahead()

    def _attend(self, seconds: float | None) -> bool:
        """Wait so long for an asker, or for news of a fork, and see to the forks; whether somebody asks."""
        at_work = {fork.connection.fileno(): fork for fork in self.forks if fork.status is None}
        watched: list[Any] = [self.listener, self.wakes, *at_work]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self.wakes in ready:
            os.read(self.wakes, 4096)
        for number in ready:
            if number in at_work:
                at_work[number].obey()
        self._reap()
        self._exit_if_over()
        return self.listener in ready

    def _look_after_forks(self, *_: object) -> None:
        """Between two steps of an import, so nothing may be raised here: an import that it interrupts may hold Python's
        lock on imports, and would leave it to every fork. The next call comes only after this one.
        """
        with suppress(OSError):
            self._attend(0)
        if self.is_loading:
            signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS)

    def _end(self, *_: object) -> None:
        self.is_ending = True
        self._exit_if_over()  # in the middle of what it loads

    def _exit_if_over(self) -> None:
        if self.is_ending and not self.forks:
            os._exit(0)

    def _reap(self) -> None:
        for fork in list(self.forks):
            if fork.status is None:
                ended, status = os.waitpid(fork.pid, os.WNOHANG)
                if ended:
                    fork.note_end(os.waitstatus_to_exitcode(status))
            if fork.has_ended():
                fork.report()
                self.forks.remove(fork)

    def _answer(self) -> Request | None:
        """Take one asker; what it wants is given in the fork, and None in the server."""
        connection, _ = self.listener.accept()
        try:
            asked, streams = receive(connection)
        except (OSError, ValueError):
            connection.close()
            return None
        pid, refusal = REFUSED, ""
        try:
            refusal = self._refusal(asked)
            pid = REFUSED if refusal else self._fork(asked, streams, connection)
        except OSError as error:
            refusal = f"{error.strerror} ({error.filename or 'fork'})"
        if not pid:
            return asked
        with suppress(OSError):  # a full disk ends no fork that is at work
            tell(f"{' '.join(asked.command)}: {f'refused: {refusal}' if refusal else f'process {pid}'}")
        for number in streams:
            os.close(number)
        if pid != REFUSED:
            self.forks.append(Fork(pid, connection))
            return None
        _tell_refused(connection)
        connection.close()
        return None

    def _fork(self, asked: Request, streams: Sequence[int], connection: socket.socket) -> int:
        """The fork's process id; 0 in the fork, which obeys signals as the command would before it tells its asker."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            if not (pid := os.fork()):
                self._leave()
                become(asked, streams, connection)
        except BaseException:
            if os.getpid() != self.pid:  # a fork that became nothing must not go on as a second server
                _tell_refused(connection)
                os._exit(1)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _refusal(self, asked: Request) -> str:
        """Why no fork of this process would be what a new process is; "" if one would."""
        if self.is_ending:
            return "the flow is over"
        if names := differs(self.environment, asked.environment):
            return f"another value of {', '.join(sorted(names))}"
        os.chdir(asked.folder)
        try:
            if not self._load(asked.command):
                return "what is loaded does not suit it"
        finally:
            os.chdir(self.folder)
        return "a library has started a thread" if has_other_threads() else ""

    def _load_ahead(self) -> None:
        """One step of what the next expected command needs."""
        if self.ahead is None:
            self.ahead = self.recipe.load(self.expected[0])
        try:
            with self._looking_after_forks():
                next(self.ahead)
        except Exception:  # its end; of an error it is told by the command itself, which meets it again
            self.ahead = None
            self.expected.pop(0)
            self._freeze()

    def _load(self, command: Sequence[str]) -> bool:
        steps = self.recipe.load(command)
        try:
            with self._looking_after_forks():
                while True:
                    next(steps)
        except StopIteration as end:
            suits = bool(end.value)
        except Exception:
            suits = False
        self._freeze()
        return suits

    @contextmanager
    def _looking_after_forks(self) -> Iterator[None]:
        """They do not wait for a library."""
        self.is_loading = True
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS)
        try:
            yield
        finally:
            self.is_loading = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _freeze(self) -> None:
        """Or the first search for cycles in each fork writes to every page."""
        if len(sys.modules) > self.num_frozen:
            gc.collect()
            gc.freeze()
            self.num_frozen = len(sys.modules)

    def _leave(self) -> None:
        """Close, in a fork, what is the server's."""
        signal.set_wakeup_fd(-1)
        for number in (self.wakes, self._woken):
            os.close(number)
        self.listener.close()
        for fork in self.forks:
            fork.connection.close()


def _tell_refused(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(REFUSED).encode() + b"\n")


def main() -> None:
    """Serve; and, in each fork, run its command in place of `main`."""
    prepare_quick_exit()
    recipe = cast(Recipe, importlib.import_module(sys.argv[2]))
    expected = [command.split() for command in sys.argv[3:]]
    asked = Server(socket.socket(fileno=int(sys.argv[1])), recipe, expected).serve()
    with quick_exit():
        runpy.run_module(asked.command[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
