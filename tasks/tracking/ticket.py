"""One promotion at a time on one registry, from whatever machine: whoever moves aliases holds a ticket.

MLflow has no compare-and-set, but a tag of a registered model is one row under a key of its own. A ticket is such a tag
under a random key: it is put there, then all tickets are read, and the registry is held only where no other living one
lies there. Of two that come at once the later reader sees the other, so both never hold it; where both see each other,
both withdraw and try again after random pauses. A ticket is taken away by its own key, so a late or double removal
never hits its successor, as deleting a lock by its name could. Nothing else appears among people's models.

A ticket is dead where its process is gone (`processes.py`), or after STALE_SECONDS. `Ticket.check`, called before every
write, lets none be made after HOLD_SECONDS or without the ticket: a process that was stopped in the middle and taken
for dead refuses to go on. What is left open is a process stopped for ten minutes between that check and its one write;
MLflow offers nothing to close it. Clocks of machines must agree within ten minutes.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasks.tracking.processes import is_gone, this_process

if TYPE_CHECKING:
    from mlflow import MlflowClient

TICKET = "promotion.ticket."
WAIT_SECONDS = 60.0  # for another promotion's ticket; one is held for seconds
HOLD_SECONDS = 300.0  # after which its holder writes nothing more
STALE_SECONDS = 900.0  # after which others take its holder for dead, on whatever machine


class Ticket:
    """The right to move aliases of one registered model."""

    def __init__(self, client: MlflowClient, model: str):
        self.client, self.model = client, model
        self.key = f"{TICKET}{uuid.uuid4().hex}"
        self.began = time.monotonic()  # what others compare is the time of day; this process needs no clock of theirs

    def check(self) -> None:
        """ValueError where this ticket no longer gives the right to write."""
        is_there = self.key in self.client.get_registered_model(self.model).tags
        if not is_there or time.monotonic() - self.began > HOLD_SECONDS:
            raise ValueError(
                f"{self.model}: this promotion was interrupted for so long that another may have begun, so it moves "
                f"nothing more. Run it again; what it left half done is put right first."
            )


@contextmanager
def only_promotion(client: MlflowClient, model: str) -> Iterator[Ticket]:
    """Hold the registered model, which must exist; ValueError where another promotion does not let go of it."""
    from mlflow.exceptions import MlflowException

    ticket = Ticket(client, model)
    try:
        _take(ticket)
        yield ticket
    finally:
        with suppress(MlflowException):  # a ticket that cannot be given back dies with this process
            client.delete_registered_model_tag(model, ticket.key)


def _take(ticket: Ticket) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while other := _in_the_way(ticket):
        if time.monotonic() > deadline:
            raise ValueError(
                f"{ticket.model}: another promotion (process {other['pid']} on {other['host']}, begun "
                f"{_moment(other['at'])}) holds the registry, and two at once could both become champion. Wait for it "
                f"or end it, then run again; from {_moment(other['at'] + STALE_SECONDS)} on it is taken for dead."
            )
        time.sleep(random.uniform(0.05, 0.3))


def _in_the_way(ticket: Ticket) -> Mapping[str, Any] | None:
    """A living ticket of somebody else; None where this one lies there alone, which holds the registry."""
    other = _living(ticket)
    if other is None:
        ticket.began = time.monotonic()
        ticket.client.set_registered_model_tag(ticket.model, ticket.key, json.dumps(_signed(time.time())))
        other = _living(ticket)
        if other is not None:
            ticket.client.delete_registered_model_tag(ticket.model, ticket.key)
    return other


def _living(ticket: Ticket) -> Mapping[str, Any] | None:
    """Another ticket whose holder lives; those of the dead are removed."""
    for key, text in ticket.client.get_registered_model(ticket.model).tags.items():
        if key.startswith(TICKET) and key != ticket.key:
            holder = json.loads(text)
            if not _is_dead(holder):
                return dict(holder)
            ticket.client.delete_registered_model_tag(ticket.model, key)
    return None


def _signed(now: float) -> dict[str, Any]:
    return {**this_process(), "at": now}


def _is_dead(holder: Mapping[str, Any]) -> bool:
    return holder["at"] + STALE_SECONDS < time.time() or is_gone(holder)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
