"""What an asker (`forked.py`) sends to the fork server (`fork_server.py`), and what may differ in its environment."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

REFUSED, STREAMS = -1, (0, 1, 2)
HEADER_BYTES, REQUEST_SECONDS = 8, 5.0
IS_FORK = "TURNWISE_FORK"  # has its process id, so what it starts is none
# What may differ from this process's environment: no library that is loaded early reads it before a command runs.
FREE_PREFIXES = ("TURNWISE_", "DVC_", "MLFLOW_", "_MLFLOW_", "PREFECT_", "AWS_")
OF_A_SHELL = {"HOME", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "TMPDIR", "PATH"}
OF_PYTHON = {"PYTHONHASHSEED", "PYTHONUNBUFFERED"}
PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}
FREE = OF_A_SHELL | OF_PYTHON | PROXIES | {name.lower() for name in PROXIES}


@dataclass(frozen=True, slots=True)
class Request:
    """What an asker wants run: its `command` (a module and its arguments), and what it has itself."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    ignored: list[int]  # signals

    @classmethod
    def of(cls, text: bytes) -> Request:
        """ValueError for anything else."""
        try:
            asked = cls(**json.loads(text))
            texts = [*asked.command, *asked.environment, *asked.environment.values(), asked.folder]
            is_sound = bool(asked.command) and all(isinstance(item, str) for item in texts)
            is_sound &= all(isinstance(number, int) for number in [asked.umask, *asked.ignored])
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a request of another shape ({error})") from None
        if not is_sound:
            raise ValueError("a request of another shape")
        return asked


def receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """The request and the three standard streams that came with it; ValueError or OSError where it is not whole."""
    connection.settimeout(REQUEST_SECONDS)
    header, given, _, _ = socket.recv_fds(connection, HEADER_BYTES, len(STREAMS))
    streams, left, pieces = list(given), int.from_bytes(header, "big"), list[bytes]()
    try:
        while left > 0 and (piece := connection.recv(min(left, 1 << 16))):
            pieces.append(piece)
            left -= len(piece)
        connection.settimeout(None)
        if len(streams) != len(STREAMS):
            raise ValueError("a request without its streams")
        return Request.of(b"".join(pieces)), streams
    except (OSError, ValueError):
        for number in streams:
            os.close(number)
        raise


def differs(ours: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    """The variables that a library may have read when it was loaded here, and that the asker has otherwise."""
    names = {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)}
    return {name for name in names if name not in FREE and not name.startswith(FREE_PREFIXES)}
