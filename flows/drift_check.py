"""drift-check: does the environment still answer as at curation, and is the champion as good as when promoted?"""

# No `from __future__ import annotations`: in a child of `serve` Prefect could not resolve the parameters' types.
from prefect import flow
from prefect.client.schemas.objects import State

from flows.events import emit_alarm
from flows.labels import name_run
from flows.one_run import begin_flow, run_alone
from flows.parameters import Hidden
from flows.steps import Stages, run_command
from flows.verdict import end
from tasks.commands.drift_check import RESULT, ROOM
from tasks.core.files import read_json
from tasks.core.settings import load_paths, read_params

ALARMS = {"Fell": "champion_fell", "Drifted": "drift"}  # by the name of the state


@flow(name="drift-check", flow_run_name=name_run)
def drift_check(is_shown: Hidden = False) -> State[None]:
    """Compare the environment with the one that was curated, and the champion with what it was promoted with."""
    with begin_flow():
        params = read_params()
        verdict = run_alone(params, _check, is_shown=is_shown)
        if kind := ALARMS.get(str(verdict.name)):  # only now: the retrain that it starts needs the turn
            emit_alarm(params["promote"]["model_name"], kind, str(verdict.message))
        return verdict


def _check(stages: Stages) -> State[None]:
    stages.run_task(run_command, "drift-check", env={})
    found = read_json(load_paths(read_params()).artifacts / ROOM / RESULT)
    name = "Fell" if found["fell"] else "Drifted" if found["environment"] else "Steady"
    return end(name, found["sentence"])
