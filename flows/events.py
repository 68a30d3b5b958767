"""The events that automations react to (`infra/automations/`). The resource is the registered model.

`python -m flows.events rolled_back MODEL VERSION MESSAGE` emits one for a command outside any flow.
`turnwise.promoted`, `.held`, `.rolled_back` and `.alarm`; an alarm's label `turnwise.kind` is `failed`, or what
drift-check found: `drift`, `champion_fell`.
"""

from __future__ import annotations

import sys
from typing import Any

from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.events.worker import EventsWorker

from tasks.core.files import read_json
from tasks.core.settings import Paths
from tasks.core.text import one_line

EVENTS = {"Promoted": "turnwise.promoted", "Held": "turnwise.held", "Rejected": "turnwise.held"}


def resource_id(model: str) -> str:
    return f"turnwise.model.{model}"


def emit(event: str, model: str, labels: dict[str, str], payload: dict[str, Any]) -> None:
    """`labels` are what an automation can match, `payload` what its message can repeat."""
    resource = {"prefect.resource.id": resource_id(model), "prefect.resource.name": model}
    emit_event(event, resource={**resource, **{f"turnwise.{name}": value for name, value in labels.items()}},
               payload={"model": model, **payload})  # fmt: skip


def emit_verdict(model: str, verdict: State[Any], paths: Paths) -> None:
    """Nothing where nothing was decided."""
    event = EVENTS.get(str(verdict.name))
    if event is not None:
        outcome = read_json(paths.stage("promote") / "outcome.json")
        version = str(outcome["champion"] or "")
        emit(event, model, {"version": version}, {"message": str(verdict.message), "champion": version})


def emit_alarm(model: str, kind: str, message: str) -> None:
    emit("turnwise.alarm", model, {"kind": kind}, {"message": one_line(message, 1000)})


def main(event: str, model: str, version: str, message: str) -> None:
    emit(f"turnwise.{event}", model, {"version": version}, {"message": message, "champion": version})
    EventsWorker.instance().drain()  # waits until the server has it


if __name__ == "__main__":
    main(*sys.argv[1:])
