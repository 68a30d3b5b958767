"""Faults that may be gone in a minute: a network, a disk, a server or a lock. A program that ends with one has its own
exit status, so that whoever started it can try again; a wrong setting or a bug is never tried again.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.core.text import one_line

PASSING_STATUS = 75  # EX_TEMPFAIL of sysexits.h
# By name, since importing these libraries to ask would take seconds. Their subclasses count too.
NETWORK_ERRORS = {
    ("botocore.exceptions", "HTTPClientError"),
    ("httpx", "TransportError"),
    ("httpx2", "TransportError"),
    ("requests.exceptions", "ConnectionError"),
    ("requests.exceptions", "Timeout"),
    ("urllib3.exceptions", "HTTPError"),
}
# Of a disk or a network's folder that does not answer, and of a process or machine with too many open files.
PASSING_ERRNOS = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.EMFILE, errno.ENFILE, errno.ENOLCK)
# There is no such file: it was removed, or something else has its name. Any other OSError says nothing about a file.
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class PassingFault(ValueError):
    """What did not answer may answer later; the message is for people, as of every ValueError."""

    is_passing = True


@contextmanager
def reading(what: str, *, loss: str) -> Iterator[None]:
    """PassingFault where the system cannot read now what may be whole. Errors of NOT_THERE stay as they are."""
    try:
        yield
    except NOT_THERE:
        raise
    except OSError as error:
        raise PassingFault(
            f"{what} cannot be read now ({one_line(error)}), so {loss}. Run the same command again where its disk "
            f"answers and you may read it."
        ) from error


def causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def is_passing(error: BaseException) -> bool:
    """The first error of the chain that says so itself (`is_passing`) decides; else whether one is of a network or of a
    disk that did not answer.
    """
    for link in causes(error):
        told = getattr(link, "is_passing", None)
        if isinstance(told, bool):
            return told
        if isinstance(link, (ConnectionError, TimeoutError)) or is_of_a_network(link):
            return True
        if isinstance(link, OSError) and link.errno in PASSING_ERRNOS:
            return True
    return False


def may_pass(error: BaseException) -> bool:
    """Whether an error of the user's code may be gone at its next try, as a lost connection is.

    Wider than `is_passing`: there a whole program is started again, so an OSError that says nothing of a network or a
    disk counts as a bug.
    """
    return not is_of_a_file(error) and (isinstance(error, OSError | EOFError) or is_of_a_network(error))


def is_of_a_file(error: BaseException) -> bool:
    """Whether a file is missing or forbidden, or a disk is full: the next try finds it as it was."""
    return isinstance(error, (*NOT_THERE, PermissionError)) or getattr(error, "errno", None) == errno.ENOSPC


def members(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, or the error alone."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for item in error.exceptions:
        yield from members(item)


def is_of_a_network(error: BaseException) -> bool:
    """Whether it is one of NETWORK_ERRORS."""
    return any((kind.__module__, kind.__name__) in NETWORK_ERRORS for kind in type(error).__mro__)
