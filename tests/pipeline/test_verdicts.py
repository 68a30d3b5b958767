"""How a run ends: its state is the verdict, a stage has its time, and only what may pass is tried again."""

from __future__ import annotations

import errno
import logging
import re
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import httpx2
import pytest

from flows import drift_check, labels, steps, turn
from flows.one_run import LOGS, _is_news
from flows.processes import Guardian, OutOfTime, run_streamed
from flows.sight import artifact_key, escape
from flows.steps import StageFailed, StageInterrupted, _failure, _Output
from flows.verdict import end, name_verdict
from tasks.core.files import read_json
from tasks.core.passing_faults import PASSING_STATUS, PassingFault, is_passing
from tasks.core.progress import PROGRESS_VARIABLE, progress_bar
from tasks.core.settings import load
from tasks.pipeline.cli_errors import one_line_errors, status_of
from tasks.pipeline.run_lock import AnotherRun
from tasks.pipeline.settings import PipelineSections
from tests.profiles import profile_params

GAIN = {"difference": 0.004, "p_value": 0.4}


@pytest.mark.parametrize(
    ("decision", "approval", "comparison", "name", "message"),
    [
        ("promote", "not_needed", GAIN, "Promoted", "promoted: version 3, +0.4 points, p = 0.400"),
        ("hold", "not_needed", GAIN, "Held", "held: +0.4 points, p = 0.400"),
        ("reject", "not_needed", GAIN, "Rejected", "rejected: +0.4 points, p = 0.400"),
        ("hold", "waiting", GAIN, "Waiting", "waiting: for a person's approval of s1, +0.4 points, p = 0.400"),
        ("hold", "not_needed", None, "Held", "held: Promotions are held."),
    ],
)
def test_the_state_of_a_run_is_its_decision(decision: str, approval: str, comparison: Any, name: str, message: str):
    state = name_verdict(*rows(decision=decision, approval=approval, comparison=comparison))
    assert (state.name, state.message) == (name, message)
    assert state.is_completed()


def test_a_run_that_decided_nothing_new_is_unchanged():
    outcome, decision = rows(decision="hold", approval="not_needed", comparison=GAIN)
    state = name_verdict({**outcome, "decided_at": "later"}, decision)
    assert (state.name, state.message) == ("Unchanged", "unchanged: version 3 is champion already")


def rows(*, comparison: Any, **row: str) -> tuple[dict[str, Any], dict[str, Any]]:
    outcome = {"decided_at": "now", "snapshot": "s1", "registered_version": 3, "champion": 3, **row}
    return outcome, {"decided_at": "now", "comparison": comparison, "reasons": ["Promotions are held."], **row}


@pytest.mark.parametrize(
    ("name", "after"),
    [("Fell", ["alarm champion_fell"]), ("Drifted", ["alarm drift"]), ("Steady", []), ("Skipped", [])],
)
def test_an_alarm_comes_once_the_turn_is_free_for_the_run_that_it_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, after: list[str]
):
    done: list[str] = []

    def run_alone(*args: Any, **options: Any) -> Any:
        done.append("turn given back")
        return end(name, "by 9 points")

    monkeypatch.setattr(drift_check, "read_params", lambda: profile_params("test"))
    monkeypatch.setattr(drift_check, "begin_flow", nullcontext)
    monkeypatch.setattr(drift_check, "run_alone", run_alone)
    monkeypatch.setattr(drift_check, "emit_alarm", lambda model, kind, message: done.append(f"alarm {kind}"))
    assert drift_check.drift_check.fn().name == name
    assert done == ["turn given back", *after]


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path):
    guardian, pid_file = Guardian(), tmp_path / "pid"
    script = "import subprocess, time; child = subprocess.Popen(['sleep', '600']); "
    script += f"open({str(pid_file)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    started = time.monotonic()
    with pytest.raises(OutOfTime):
        run_streamed(
            [sys.executable, "-c", script], env={}, guardian=guardian, on_line=lambda line: False,
            is_terminal=False, timeout_seconds=1.0,
        )  # fmt: skip
    guardian.close()
    assert time.monotonic() - started < 300
    assert not Path(f"/proc/{pid_file.read_text()}/cmdline").exists()


def test_every_step_has_a_limit_of_its_own():
    limits = PipelineSections(pipeline=profile_params("demo")["pipeline"]).pipeline.stage_timeout_hours
    assert limits.seconds("train") == 720 * 3600
    assert limits.seconds("drift-check") == 24 * 3600


@pytest.mark.parametrize(
    ("status", "lines", "kind"),
    [
        (PASSING_STATUS, [], StageInterrupted),
        (255, ["ERROR: failed to reproduce 'train': failed to run: python -m tasks train, exited with 75"],
         StageInterrupted),
        (255, ["ERROR: Unable to acquire lock. Most likely another DVC process is running"], StageInterrupted),
        (255, ["error: no.", "ERROR: failed to reproduce 'train': failed to run: python -m tasks train, exited with 1"],
         StageFailed),
        (1, ["error: params.yaml: train.loss = 'x' is refused"], StageFailed),
        (-9, [], StageFailed),
    ],
)  # fmt: skip
def test_only_a_fault_that_may_pass_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, status: int, lines: list[str], kind: type[StageFailed]
):
    monkeypatch.setattr(steps, "get_run_logger", lambda: Silent())
    output = _Output("train", is_shown=False)
    for line in lines:
        output(line)
    failure = _failure("train", status, output)
    assert type(failure) is kind
    assert status_of(failure) == (PASSING_STATUS if kind is StageInterrupted else 1)  # of the flow
    if lines and lines[0].startswith("error: "):
        assert lines[0].removeprefix("error: ") in str(failure)  # the list of runs shows it


def test_as_many_retries_as_the_settings_allow_are_as_many_as_prefect_takes():
    pipeline = profile_params("test")["pipeline"]
    most = load(PipelineSections, {"pipeline": {**pipeline, "max_retries": 50}}).pipeline.max_retries
    steps.run_stage.with_options(retries=most, retry_delay_seconds=[1.0] * most)
    with pytest.raises(ValueError, match="max_retries"):
        load(PipelineSections, {"pipeline": {**pipeline, "max_retries": most + 1}})


class Silent:
    def info(self, line: str) -> None:
        pass


def test_the_exit_status_tells_a_fault_that_may_pass_from_one_that_will_not():
    assert (
        exit_status(PassingFault("the server is away")) == exit_status(ConnectionResetError()) == PASSING_STATUS == 75
    )
    assert exit_status(httpx2.RemoteProtocolError("Server disconnected")) == PASSING_STATUS
    assert exit_status(OSError(errno.ESTALE, "Stale file handle")) == PASSING_STATUS
    assert exit_status(ValueError("train.loss = 'x' is refused")) == exit_status(KeyError("x")) == 1


def test_an_error_that_knows_itself_decides_before_what_caused_it():
    lasting = ValueError("the bucket is not there")
    lasting.is_passing = False  # type: ignore[attr-defined]
    lasting.__cause__ = TimeoutError()
    assert not is_passing(lasting)


def exit_status(error: Exception) -> Any:
    with pytest.raises(SystemExit) as ended, one_line_errors(debug=False):
        raise error
    return ended.value.code


def test_a_progress_bar_writes_how_far_it_is_where_a_flow_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "train.json"
    monkeypatch.setenv(PROGRESS_VARIABLE, str(file))
    with progress_bar("train", total=4, done=1) as bar:
        bar.advance("success 10%")
    assert read_json(file) == {"label": "train", "done": 2, "total": 4, "detail": "success 10%"}


def test_what_others_wrote_is_no_markup_and_no_key():
    assert escape("[x](javascript:alert)\n<b>") == r"\[x\](javascript:alert) \<b\>"
    assert artifact_key("My Agent_2", "warm_start") == "my-agent-2-warm-start"


FOR_PEOPLE = (
    "raise StageFailed('train failed')",
    "with nullcontext():\n    raise ValueError('params.yaml: train.x is unknown')",
    "load(PipelineSections, {'pipeline': {}})",  # pydantic refuses it, and `load` says so
)
BUGS = (
    "raise KeyError('a bug')",
    "[1].index(2)",
    "b'\\xff'.decode()",
    "import json; json.loads('{')",
    "PipelineSections.model_validate({})",
)


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize(
    ("source", "is_told"), [*((source, False) for source in FOR_PEOPLE), *((source, True) for source in BUGS)]
)
def test_an_error_for_people_is_in_the_line_of_the_state_and_in_no_traceback_of_prefects_and_a_bug_is(
    name: str, source: str, is_told: bool
):
    """All but the first of the bugs are a ValueError."""
    logger, heard = logging.getLogger(f"{name}.of_this_test"), list[logging.LogRecord]()

    def hear(record: logging.LogRecord) -> bool:
        heard.append(record)
        return False

    logger.filters = [_is_news, hear]
    with pytest.raises((ValueError, KeyError)) as caught:
        exec(source, {**globals(), "__name__": "tasks.of_this_test"})
    logger.error("Encountered exception during execution: %r", caught.value, exc_info=caught.value)
    assert bool(heard) == is_told


def test_a_run_that_finds_another_at_work_says_so_and_gives_no_advice_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def taken(artifacts: Path) -> None:
        raise AnotherRun(f"{artifacts}: another run (process 7) is at work")

    monkeypatch.setattr(turn, "only_flow", taken)
    with ExitStack() as held, pytest.raises(turn.Busy) as caught:
        turn._take(held, tmp_path, "shop")
    assert str(caught.value) == f"{tmp_path}: another run (process 7) is at work"


def test_a_run_that_is_taken_up_again_keeps_the_name_of_its_first_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__NAME", "shop-agent 2026-11-29 02:30")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "1")
    assert labels.name_run() == "shop-agent 2026-11-29 02:30"
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", "0")
    assert re.fullmatch(r".+ 20\d\d-\d\d-\d\d \d\d:\d\d", labels.name_run())
    assert labels.name_run() != "shop-agent 2026-11-29 02:30"
