"""evaluate-snapshot: any model on the problems of select, beside whatever is trained; nothing is promoted."""

# No `from __future__ import annotations`: in a child of `serve` Prefect could not resolve the parameters' types.
from prefect import flow
from prefect.client.schemas.objects import State

from flows.labels import name_run
from flows.one_run import begin_flow, run_alone
from flows.parameters import Hidden, Source
from flows.steps import Stages, run_command
from flows.verdict import end
from tasks.commands.evaluate_snapshot import RESULT, ROOM
from tasks.core.files import read_json
from tasks.core.settings import load_paths, read_params


@flow(name="evaluate-snapshot", flow_run_name=name_run)
def evaluate_snapshot(source: Source, is_shown: Hidden = False) -> State[None]:
    """Play a model on the problems of select, never of test.

    Args:
        source: A snapshot of the last training such as iteration-0040, a model folder, models:/NAME@ALIAS or an s3://
            URL.
        is_shown: A person watches the terminal, so lines are printed there.
    """

    def work(stages: Stages) -> State[None]:
        stages.run_task(run_command, "evaluate-snapshot", env={}, arguments=[source])
        result = read_json(load_paths(read_params()).artifacts / ROOM / RESULT)
        return end("Evaluated", f"{result['name']}, success {result['success_rate']:.1%} on select")

    with begin_flow():
        return run_alone(read_params(), work, is_shown=is_shown)
