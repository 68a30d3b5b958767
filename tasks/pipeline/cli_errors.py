"""For `python -m tasks` and `python -m flows`: an error is one clear message, and no library sends usage data."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tasks.core.files import is_disk_full
from tasks.core.passing_faults import PASSING_STATUS, causes, is_passing
from tasks.core.surroundings import exempt_loopback, not_writable
from tasks.core.terminal import tame_logs_and_tracebacks, warn
from tasks.core.text import one_line

# What libraries that write through C or SQLite report for a full disk; their errors have no errno.
DISK_FULL_PHRASES = ("No space left on device", "database or disk is full", "Disk quota exceeded")
DEBUG = "--debug"
INTERRUPTED_STATUS = 130  # 128 + SIGINT, as shells have it
STANDARD_OUTPUT = 1
# Usage data is sent to nobody. Each library reads its variable when it is imported.
TELEMETRY_OFF = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def switch_telemetry_off() -> None:
    """For this process and its children; call it before heavy imports. Values that the user set stay."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


@contextmanager
def one_line_errors(*, debug: bool) -> Iterator[None]:
    """Turn what ends the block into one message on standard error and an exit status.

    A ValueError is a message for people; for anything else the message names `--debug`, which shows the traceback.
    The status is 1, or PASSING_STATUS where trying again later may be enough.
    Ctrl-C exits with 130, SIGTERM with 143 and SIGHUP with 129, after half-written files have been removed. Where the
    reader of standard output has gone, as `head` does, it is 141, without a word.
    """
    tame_logs_and_tracebacks()
    exempt_loopback()
    switch_telemetry_off()
    before = {
        number: signal.signal(number, _terminate) for number in (signal.SIGTERM, signal.SIGHUP) if _is_obeyed(number)
    }
    try:
        yield
    except KeyboardInterrupt:
        _stop(
            "interrupted; nothing is left half-written. Run again to continue from a checkpoint, or to start over.",
            INTERRUPTED_STATUS,
        )
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)  # or the rest is written at the exit, in vain
            raise SystemExit(128 + signal.SIGPIPE) from None
        if debug:
            raise
        _stop(message_of(error), status_of(error))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_in_another_python(error: ModuleNotFoundError) -> NoReturn:
    """End a command whose Python has none of turnwise's packages: `.venv` is not activated."""
    _stop(
        f"{sys.executable} has no package {error.name}, because turnwise's packages are in .venv. Run "
        f"`source .venv/bin/activate` in the project's root, then the command again; where there is no .venv, "
        f"`make setup-demo` makes it.",
        1,
    )


def status_of(error: Exception) -> int:
    return PASSING_STATUS if is_passing(error) else 1


def message_of(error: Exception) -> str:
    """What it says to people."""
    if any(_is_disk_full(link) for link in causes(error)):
        return (
            f"the disk is full ({_describe_disk(error)}), so the results of this step could not be written; nothing is "
            f"left half-written. Free some space (`python -m tasks prune` lists what nothing needs), then run again: "
            f"finished stages are not repeated."
        )
    if isinstance(error, ValueError):
        return str(error)
    if told := next(filter(None, map(not_writable, causes(error))), None):
        return told
    return f"{type(error).__name__}: {one_line(error, 500)}. Run again with {DEBUG} for the traceback."


def _has_no_reader() -> bool:
    """Standard output; a connection may break as a pipe does."""
    watched = select.poll()
    watched.register(STANDARD_OUTPUT, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


def _describe_disk(error: Exception) -> str:
    """The folder of the file that an error names, or this one, and what its disk has free."""
    from tasks.planning.hardware import amount

    named = next((link.filename for link in causes(error) if isinstance(link, OSError) and link.filename), None)
    file = Path(os.fsdecode(named) if isinstance(named, (str, bytes)) else "").absolute()
    folder = next(place for place in (file, *file.parents) if place.is_dir())
    return f"{folder}: {amount(shutil.disk_usage(folder).free)} are free"


def _is_disk_full(error: BaseException) -> bool:
    return is_disk_full(error) or any(phrase in str(error) for phrase in DISK_FULL_PHRASES)


def _stop(message: str, status: int) -> NoReturn:
    warn(f"error: {message}")
    raise SystemExit(status) from None


def _is_obeyed(number: signal.Signals) -> bool:
    """`nohup` starts a program with SIGHUP ignored, so that it outlives its terminal."""
    return signal.getsignal(number) is not signal.SIG_IGN


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)
