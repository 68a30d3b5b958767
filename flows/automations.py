"""Automations from files: `python -m flows deploy --automations` creates those of infra/automations/ for this model.

A file is an automation as Prefect's API takes it, except for what only a server knows. An action names a `deployment`
by its flow, a webhook by the `url_variable` with its address, and any other block, such as one that sends e-mail, as
`block: TYPE/NAME`. The trigger is narrowed to this folder's model, whose name begins the automation's, or to the runs
of its deployments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr, ValidationError

from flows.deployments import FLOWS
from flows.events import resource_id
from tasks.core.files import read_yaml
from tasks.core.text import one_line

FOLDER = Path("infra/automations")


class NotReady(Exception):
    """The automation names what is not there; the message says how to make it."""


def register_automations(model: str, deployment: str) -> Iterator[str]:
    """Create or update each file's automation; yields a line for each. A second time changes nothing."""
    with get_client(sync_client=True) as client:
        for file in sorted(FOLDER.glob("*.yaml")):
            try:
                wanted = _read(file, client, model, deployment)
            except NotReady as missing:
                yield f"automation {file.stem}: left out; {missing}"
                continue
            yield f"automation {file.stem}: {_register(client, wanted)}"


def _register(client: SyncPrefectClient, wanted: AutomationCore) -> str:
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
        return "created"
    present = AutomationCore.model_validate(found[0].model_dump())
    if _essence(present) == _essence(wanted):
        return "unchanged"
    client.update_automation(found[0].id, wanted)
    return "updated"


def _essence(automation: AutomationCore) -> dict[str, Any]:
    """What a file says; whether it is enabled is a person's choice on the page."""
    row = automation.model_dump(mode="json", include={"name", "description", "trigger", "actions"})
    row["trigger"].pop("id", None)
    return row


def _read(file: Path, client: SyncPrefectClient, model: str, deployment: str) -> AutomationCore:
    row = read_yaml(file)
    try:
        row["trigger"] |= _narrow(row["trigger"], client, model, deployment)
        row["actions"] = [_fill_in(dict(action), client, model, deployment) for action in row["actions"]]
        return AutomationCore.model_validate({"name": f"{model}: {file.stem}", **row})
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file}: not an automation that Prefect takes ({type(error).__name__}: {one_line(error)}), so nothing "
            f"would react. Correct the file; the others beside it are examples."
        ) from None


def _narrow(trigger: dict[str, Any], client: SyncPrefectClient, model: str, deployment: str) -> dict[str, Any]:
    """To events of the model; those of a flow's run have no model, but the run's deployment."""
    match = trigger.get("match", {})
    if "prefect.resource.id" not in match:
        return {"match": {**match, "prefect.resource.id": resource_id(model)}}
    names = [f"{flow.name}/{deployment}" for flow in FLOWS]
    ids = [f"prefect.deployment.{client.read_deployment_by_name(name).id}" for name in names]
    return {"match_related": {"prefect.resource.role": "deployment", "prefect.resource.id": ids}}


def _fill_in(action: dict[str, Any], client: SyncPrefectClient, model: str, deployment: str) -> dict[str, Any]:
    if flow := action.pop("deployment", None):
        return {**action, "deployment_id": client.read_deployment_by_name(f"{flow}/{deployment}").id}
    if variable := action.pop("url_variable", None):
        return {**action, "block_document_id": _webhook(variable, model)}
    if block := action.pop("block", None):
        kind, _, name = block.partition("/")
        try:
            return {**action, "block_document_id": client.read_block_document_by_name(name, kind).id}
        except ObjectNotFound:
            raise NotReady(f"there is no block {block} on the server: create it on its page, under Blocks") from None
    return action


def _webhook(variable: str, model: str) -> Any:
    """The block with the address that the variable has; where it is not set, one that an earlier call made."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{model} {variable}".lower()).strip("-")
    url = os.environ.get(variable)
    try:
        present: Webhook | None = Webhook.load(name, _sync=True)
    except ValueError:
        present = None
    if not url and present is None:
        raise NotReady(f"export {variable} with the webhook's address")
    if url and (present is None or present.url.get_secret_value() != url):
        return Webhook(url=SecretStr(url)).save(name, overwrite=True, _sync=True)
    assert present is not None
    return present._block_document_id
