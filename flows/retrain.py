"""retrain: the whole chain as one flow, from raw problems to a champion.

Runs the stages through DVC in the order of `dvc.yaml`, the doctor before the warm start, then promotion and the report;
and only for a reason (`tasks/pipeline/reasons.py`). `python -m flows run`, `serve` or a worker (`deploy`) starts it,
always in the project's root.
"""

# No `from __future__ import annotations`: in a child of `serve` Prefect could not resolve the parameters' types.
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run

from flows.approval import answer_limit, ask_a_person, own_question, take_answer
from flows.dead_locks import release_dead_locks
from flows.events import emit_verdict
from flows.labels import add_tags, name_run
from flows.mlflow_runs import RunLogger, tracking_settings
from flows.one_run import begin_flow, run_alone
from flows.parameters import AS_IT_IS, Hidden, Profile, Reason
from flows.prefect_runs import check_run_is_wanted, own_run_id
from flows.sight import show_places, show_progress, show_results
from flows.steps import StageRun, Stages, refuse_edits, run_command, run_stage
from flows.verdict import WAITING, end, read_verdict
from tasks.commands.doctor.doctor import has_passed
from tasks.commands.profile import apply_profiles, read_profiles
from tasks.commands.reproduction import uncommitted_code
from tasks.core.console import SafeConsole
from tasks.core.files import read_json, write_json
from tasks.core.provenance import code_hashes
from tasks.core.settings import PARAMS_FILE, Paths, load_paths, parse_params, read_params
from tasks.core.stages import STAGES
from tasks.core.surroundings import seconds_since_start
from tasks.core.terminal import tell
from tasks.core.text import first_few, one_line
from tasks.pipeline.order import check_params
from tasks.pipeline.reasons import RunReasons, begin_run, find_reasons
from tasks.report.summary import print_places
from tasks.stages.promote.origin import find_edit
from tasks.stages.promote.record import OUTCOME_FILE
from tasks.storage.inputs import check_storage, share_endpoint
from tasks.tracking.connection import refuse_lost_registry
from tasks.tracking.finish_seen import note_finish
from tasks.tracking.versions import CHAMPION, DECISION_FILE

PROMOTE = "promote"  # DVC does not run it: it has a side effect
CHECKED_BY_DOCTOR = "warm_start"  # which may take hours; by then all that the doctor reads is there


@flow(name="retrain", flow_run_name=name_run)
def retrain(
    profile: Profile = AS_IT_IS, reason: Reason = "", force: bool = False, is_shown: Hidden = False
) -> State[None]:
    """Curate, assess, warm start, train, evaluate, promote, report; what did not change is not repeated.

    Args:
        profile: Rewrite params.yaml from a profile first, as `python -m tasks profile` does. The choice `params.yaml`
            leaves it as it is.
        reason: Why this run is wanted; it is recorded with the run and its model. Without one the run starts only if
            something changed.
        force: Train anew also where nothing changed, with the next seed. Needs a reason.
        is_shown: A person watches the terminal, so lines are printed there.
    """

    def work(stages: Stages) -> State[None]:
        if profile != AS_IT_IS:
            apply_profiles([profile])
        return _run_for_a_reason(stages, asked=reason or None, force=force)

    with begin_flow():
        if question := own_question():
            return take_answer(question, read_params())
        params = read_params() if profile == AS_IT_IS else parse_params(read_profiles([profile]), PARAMS_FILE)
        if profile != AS_IT_IS:
            add_tags(f"profile: {profile}")
        verdict = run_alone(params, work, is_shown=is_shown)
        return ask_a_person(verdict, params) if verdict.name == WAITING else verdict


def _run_for_a_reason(stages: Stages, *, asked: str | None, force: bool) -> State[None]:
    params = read_params()
    check_params(params)
    share_endpoint(params)  # with DVC, which asks S3 what changed
    check_storage(params)
    paths = load_paths(params)
    refuse_lost_registry(tracking_settings(params))
    release_dead_locks()
    found = find_reasons(params, paths, asked=asked, force=force)
    add_tags(*(f"reason: {kind}" for kind in found.kinds))
    _tell(stages, found.sentence)
    if not found.is_needed:
        _note_finish(params, paths, stages)
        return _end_unchanged(params["promote"]["model_name"], found, paths, stages)
    if line := begin_run(found, params, paths):
        _tell(stages, line)
    _tell_uncommitted(stages)
    verdict = _run_all(read_params(), paths, found, stages)
    add_tags(str(verdict.name).lower())
    emit_verdict(params["promote"]["model_name"], verdict, read_json(paths.stage(PROMOTE) / OUTCOME_FILE)["champion"])
    return verdict


def _end_unchanged(model: str, found: RunReasons, paths: Paths, stages: Stages) -> State[None]:
    """Show where the results of the last run are, and end the flow as Unchanged."""
    assert found.last is not None
    show_places(model, paths, run_id=found.last.run_id, run_page=None)
    if stages.is_shown:
        print_places(paths, SafeConsole())
    return end("Unchanged", found.sentence)


def _run_all(params: dict[str, Any], paths: Paths, found: RunReasons, stages: Stages) -> State[None]:
    model, done = params["promote"]["model_name"], []
    logger = RunLogger(tracking_settings(params), params, paths, name=flow_run.name, prefect_run=str(own_run_id()))
    with logger:
        for stage in STAGES:
            if stage == CHECKED_BY_DOCTOR:
                _run_doctor(params, paths, stages)
            with show_progress(stage, model, paths) as variables:
                done.append(_run(stage, paths, stages, logger, variables, force=found.is_forced(stage)))
            if stage != PROMOTE:
                refuse_edits(stage, paths)
        run_id = logger.run_id()
        record = run_record(done, paths, mlflow_run_id=run_id, mlflow_uri=tracking_settings(params).uri)
        write_json(paths.artifacts / "run.json", record)
        logger.log_traces()
        stages.run_task(run_command, "report", env={})
        show_results(done, found.sentence, model, paths, run_id=run_id, run_page=logger.run_page())
        logger.finish()
    _note_finish(params, paths, stages)
    return read_verdict(paths)


def _tell_uncommitted(stages: Stages) -> None:
    """Before hours of training: later nobody can commit what it ran with."""
    files = uncommitted_code("HEAD", {"train": {"code": code_hashes("train")}})
    if files:
        told = f"{first_few(files)} {'is' if len(files) == 1 else 'are'} not committed to git as training reads it"
        _tell(stages, f"warning: {told}, so a champion of this run could not be made again. Commit it before a run.")


def _note_finish(params: dict[str, Any], paths: Paths, stages: Stages) -> None:
    """A run that finished stays finished where the note cannot be written: the next one asks MLflow."""
    try:
        note_finish(tracking_settings(params), params["promote"]["model_name"], paths)
    except (ValueError, OSError) as error:
        _tell(stages, f"warning: the next run asks MLflow what changed, which takes seconds: {one_line(str(error))}")


def _run(stage: str, paths: Paths, stages: Stages, logger: RunLogger, variables: Any, *, force: bool) -> StageRun:
    check_run_is_wanted(stage)
    _tell(stages, f"── {stage}")
    env = {**logger.begin_stage(stage), **variables}
    if stage == PROMOTE:
        run = stages.run_task(run_command, stage, env={**env, **answer_limit(read_params())})
    else:
        run = stages.run_task(run_stage, stage, env=env, force=force)
        edit = find_edit(stage, paths) if run.is_cached else None
        if edit and edit.stage == stage and not edit.in_lock:  # a `dvc repro` by hand put it into DVC's cache so
            _tell(stages, f"   {edit.told}: what DVC has cached is not of that, so {stage} runs again")
            run = stages.run_task(run_stage, stage, env=env, force=True)
    logger.end_stage(run)
    _tell(stages, f"   {stage}: {'nothing changed, ' if run.is_cached else ''}{run.seconds:.1f} s")
    return run


def _run_doctor(params: dict[str, Any], paths: Paths, stages: Stages) -> None:
    _tell(stages, "── doctor")
    if has_passed(params, paths):
        _tell(stages, "   doctor: nothing changed")
        return
    run = stages.run_task(run_command, "doctor", env={})
    _tell(stages, f"   doctor: {run.seconds:.1f} s")


def run_record(done: list[StageRun], paths: Paths, *, mlflow_run_id: str, mlflow_uri: str) -> dict[str, Any]:
    """The content of run.json. `total` is the age of this process: imports, servers and waiting cost time too."""
    decision = read_json(paths.stage(PROMOTE) / DECISION_FILE)
    champion = decision["champion_after"]
    seconds = {run.stage: run.seconds for run in done}
    return {
        "seconds": {**seconds, "total": round(seconds_since_start(), 3)},
        "cached": {run.stage: run.is_cached for run in done},
        "mlflow_run_id": mlflow_run_id,
        "mlflow_uri": mlflow_uri,
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
