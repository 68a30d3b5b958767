"""What tells runs apart in Prefect's list: their names and tags."""

from __future__ import annotations

from datetime import datetime

from prefect.client.orchestration import get_client
from prefect.runtime import deployment, flow_run

from flows.prefect_runs import own_run_id
from tasks.core.settings import read_params

NAMELESS = "turnwise"  # a run of no deployment, whose params.yaml cannot be read


def name_run() -> str:
    """The model and the date of its first start: `travel-desk-agent 2026-11-22 03:00`."""
    if flow_run.run_count:  # it was retried, or waited for a person
        return str(flow_run.name)
    return f"{model_name()} {datetime.now().astimezone():%Y-%m-%d %H:%M}"


def model_name() -> str:
    """Also while params.yaml cannot be read, which the run itself says: a deployment has the model's name."""
    try:
        return str(read_params()["promote"]["model_name"])
    except (ValueError, KeyError, TypeError):
        return deployment.name or NAMELESS


def add_tags(*tags: str) -> None:
    """To this run's, in order and without repeats."""
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(own_run_id())
        client.update_flow_run(run.id, tags=list(dict.fromkeys([*run.tags, *tags])))
