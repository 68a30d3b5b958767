"""retrain: the whole chain as one flow, from raw problems to a champion.

Runs the stages through DVC in the order of `dvc.yaml`, the doctor before training, then promotion and the report.
`python -m flows run`, `serve` or a Prefect worker (`infra/prefect.yaml`) starts it, always in the project's root.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from flows.mlflow_runs import RunLogger, tracking_settings
from flows.prefect_runs import check_run_is_wanted, close_dead_runs
from flows.processes import only_flow
from flows.steps import StageRun, Stages, run_command, run_stage
from tasks.commands.doctor.doctor import has_passed
from tasks.core.files import read_json, write_json
from tasks.core.settings import Paths, load_paths, read_params
from tasks.core.surroundings import exempt_loopback, seconds_since_start
from tasks.core.terminal import tell
from tasks.pipeline.order import STAGES, check_params
from tasks.tracking.connection import refuse_lost_registry
from tasks.tracking.versions import CHAMPION

PROMOTE = "promote"  # DVC does not run it: it has a side effect
CHECKED_BY_DOCTOR = "train"  # by then everything that training reads is there


@flow(name="retrain", validate_parameters=False)
def retrain(is_shown: bool = False) -> dict[str, Any]:
    """Run everything; returns the content of run.json. `is_shown`: a person watches the terminal, so lines are printed
    there.
    """
    exempt_loopback()  # a Prefect worker did not run our command line
    check_params()
    params = read_params()
    paths = load_paths(params)
    tracking = tracking_settings(params)
    refuse_lost_registry(tracking)
    logger = RunLogger(tracking, params, paths)
    with only_flow(paths.artifacts) as guardian, logger:
        close_dead_runs()
        stages = Stages(guardian, is_shown=is_shown)
        done = []
        for stage in STAGES:
            if stage == CHECKED_BY_DOCTOR:
                _run_doctor(params, paths, stages)
            done.append(_run(stage, stages, logger))
        record = run_record(done, paths, mlflow_run_id=logger.run_id())
        write_json(paths.artifacts / "run.json", record)
        logger.log_traces()
        run_command("report", stages, {})
        logger.finish()
    return record


def _run(stage: str, stages: Stages, logger: RunLogger) -> StageRun:
    check_run_is_wanted(stage)
    _tell(stages, f"── {stage}")
    env = logger.begin_stage(stage)
    run = run_command(stage, stages, env) if stage == PROMOTE else run_stage(stage, stages, env)
    logger.end_stage(run)
    _tell(stages, f"   {stage}: {'nothing changed, ' if run.is_cached else ''}{run.seconds:.1f} s")
    return run


def _run_doctor(params: dict[str, Any], paths: Paths, stages: Stages) -> None:
    _tell(stages, "── doctor")
    if has_passed(params, paths):
        _tell(stages, "   doctor: nothing changed")
        return
    run = run_command("doctor", stages, {})
    _tell(stages, f"   doctor: {run.seconds:.1f} s")


def run_record(done: list[StageRun], paths: Paths, *, mlflow_run_id: str) -> dict[str, Any]:
    """The content of run.json. `total` is the age of this process: imports, servers and waiting cost time too."""
    decision = read_json(paths.stage(PROMOTE) / "decision.json")
    champion = decision["champion_after"]
    seconds = {run.stage: run.seconds for run in done}
    return {
        "seconds": {**seconds, "total": round(seconds_since_start(), 3)},
        "cached": {run.stage: run.is_cached for run in done},
        "mlflow_run_id": mlflow_run_id,
        "champion": {
            "model": decision["model"],
            "version": champion and champion["version"],
            "alias": CHAMPION if champion else None,
            "promoted": decision["is_champion"],
        },
    }


def _tell(stages: Stages, line: str) -> None:
    if stages.is_shown:
        tell(line)
    get_run_logger().info(line)
