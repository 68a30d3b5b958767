"""Asks a fork server (`fork_server.py`) to run `python -m …`, and stands for what it runs: the same output, the same
status or signal at the end. Without a server, or where it refuses, the command starts in the usual way.

    python -m tasks.core.forked dvc repro train
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from tasks.core.fork_request import HEADER_BYTES, IS_FORK, REFUSED, STREAMS

VARIABLE = "TURNWISE_FORK_SERVER"  # the path of its socket
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_forked(command: Sequence[str]) -> None:
    """Run `python -m <command>` by the fork server to its end, and end as it did; returns where it has to be started
    otherwise, as in the fork itself. `command`: the module and its arguments.
    """
    path = os.environ.get(VARIABLE)
    if not path or os.environ.get(IS_FORK) == str(os.getpid()):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is a fork to pass them on to
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            _ask(connection, command)
            answers = connection.makefile("r")
            if int(answers.readline()) != REFUSED:
                _end_as(_wait(connection, answers))
    except (OSError, ValueError):
        pass  # no server, or one that ended before it forked
    finally:
        os.environ.pop(VARIABLE)  # what is started otherwise starts all that it needs so
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def _ask(connection: socket.socket, command: Sequence[str]) -> None:
    ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    os.umask(umask := os.umask(0))
    request = {
        "command": list(command), "environment": dict(os.environ), "folder": os.getcwd(), "umask": umask,
        "ignored": ignored,
    }  # fmt: skip
    text = json.dumps(request).encode()
    socket.send_fds(connection, [len(text).to_bytes(HEADER_BYTES, "big")], STREAMS)
    connection.sendall(text)


def _wait(connection: socket.socket, answers: Any) -> int:
    """The status at the end, or minus the signal; what this process is told meanwhile, the fork is told. A fork has
    begun, so nothing that fails here may start the command again.
    """

    def pass_on(told: int, _: object) -> None:
        with suppress(OSError):  # it has ended
            connection.send(bytes([told]))

    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    try:
        return int(answers.readline())
    except (OSError, ValueError):
        return -signal.SIGKILL  # the server is gone, and every fork with it


def _end_as(status: int) -> NoReturn:
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    command = sys.argv[1:]
    run_forked(command)
    os.execv(sys.executable, [sys.executable, "-m", *command])


if __name__ == "__main__":
    main()
