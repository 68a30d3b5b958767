"""The events that automations react to (`infra/automations/`). The resource is the registered model.

`python -m flows.events rolled_back MODEL VERSION MESSAGE` emits one for a command outside any flow (also `promoted`).
`turnwise.promoted`, `.held`, `.rolled_back` and `.alarm`; an alarm's label `turnwise.kind` is `failed`, or what
drift-check found: `drift`, `champion_fell`.
"""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.events.schemas.events import ResourceSpecification
from prefect.events.worker import EventsWorker

from tasks.core.text import one_line

EVENTS = {"Promoted": "turnwise.promoted", "Held": "turnwise.held", "Rejected": "turnwise.held"}


def resource_id(model: str) -> str:
    return f"turnwise.model.{model}"


def emit(event: str, model: str, labels: dict[str, str], payload: dict[str, Any]) -> None:
    """`labels` are what an automation can match, `payload` what its message can repeat."""
    resource = {"prefect.resource.id": resource_id(model), "prefect.resource.name": model}
    emit_event(event, resource={**resource, **{f"turnwise.{name}": value for name, value in labels.items()}},
               payload={"model": model, **payload})  # fmt: skip


def emit_verdict(model: str, verdict: State[Any], champion: object) -> None:
    """Nothing where nothing was decided. `champion`: its version, or None."""
    if event := EVENTS.get(str(verdict.name)):
        emit_decision(event, model, str(champion or ""), str(verdict.message))


def is_promotion_told(client: SyncPrefectClient, model: str, version: int, since: str) -> bool:
    """Whether the server has the event already, as after `python -m tasks promote --approve`. One that cannot say has
    not.
    """
    wanted = EventFilter(
        event=EventNameFilter(name=[EVENTS["Promoted"]]),
        occurred=EventOccurredFilter(since=datetime.fromisoformat(since)),
        resource=EventResourceFilter(
            id=[resource_id(model)], labels=ResourceSpecification({"turnwise.version": str(version)})
        ),
    )
    try:
        return bool(client.read_events(wanted, limit=1).events)
    except httpx.HTTPError:
        return False


def emit_decision(event: str, model: str, champion: str, message: str) -> None:
    emit(event, model, {"version": champion}, {"message": message, "champion": champion})


def emit_alarm(model: str, kind: str, message: str) -> None:
    emit("turnwise.alarm", model, {"kind": kind}, {"message": one_line(message, 1000)})


def main(event: str, model: str, version: str, message: str) -> None:
    emit_decision(f"turnwise.{event}", model, version, message)
    EventsWorker.instance().drain()  # waits until the server has it


if __name__ == "__main__":
    main(*sys.argv[1:])
