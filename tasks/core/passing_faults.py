"""Faults that may be gone in a minute: a network, a server or a lock. A program that ends with one has its own exit
status, so that whoever started it can try again; a wrong setting or a bug is never tried again.
"""

from __future__ import annotations

from tasks.core.surroundings import causes

PASSING_STATUS = 75  # EX_TEMPFAIL of sysexits.h
# By name, since importing these libraries to ask would take seconds. Their subclasses count too.
NETWORK_ERRORS = {
    ("botocore.exceptions", "HTTPClientError"),
    ("httpx", "TransportError"),
    ("requests.exceptions", "ConnectionError"),
    ("requests.exceptions", "Timeout"),
    ("urllib3.exceptions", "HTTPError"),
}


class PassingFault(ValueError):
    """What did not answer may answer later; the message is for people, as of every ValueError."""

    is_passing = True


def is_passing(error: BaseException) -> bool:
    """The first error of the chain that says so itself (`is_passing`) decides; else whether one is of a network."""
    for link in causes(error):
        told = getattr(link, "is_passing", None)
        if isinstance(told, bool):
            return told
        if isinstance(link, (ConnectionError, TimeoutError)) or _is_of_a_network(link):
            return True
    return False


def _is_of_a_network(error: BaseException) -> bool:
    return any((kind.__module__, kind.__name__) in NETWORK_ERRORS for kind in type(error).__mro__)
