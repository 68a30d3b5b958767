"""However a command ends, its user reads one message and the shell gets a status; what was half-written is gone."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flows.__main__ import app
from tasks.core.passing_faults import PASSING_STATUS
from tasks.pipeline.cli_errors import TELEMETRY_OFF, one_line_errors, switch_telemetry_off
from tests.conftest import ROOT


def status_and_message(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped, one_line_errors(debug=False):
        raise error
    return int(str(stopped.value)), capsys.readouterr().err


def test_a_value_error_is_for_people_and_speaks_for_itself(capsys: pytest.CaptureFixture[str]):
    message = "params.yaml: mu = 0 is refused. Correct it."
    assert status_and_message(ValueError(message), capsys) == (1, f"error: {message}\n")


def test_anything_else_is_named_on_one_line_with_the_way_to_the_traceback(capsys: pytest.CaptureFixture[str]):
    status, message = status_and_message(RuntimeError("shapes\n  differ"), capsys)
    assert (status, message) == (1, "error: RuntimeError: shapes differ. Run again with --debug for the traceback.\n")


def test_debug_lets_the_error_through():
    with pytest.raises(RuntimeError, match="shapes"), one_line_errors(debug=True):
        raise RuntimeError("shapes")


def test_a_full_disk_is_said_as_such_even_where_a_library_wrapped_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3_000_000))
    full = OSError(errno.ENOSPC, "No space left on device", "artifacts/train/model.safetensors")
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = full
    in_the_database = sqlite3.OperationalError("database or disk is full")

    for error, folder in ((full, "/artifacts"), (wrapped, "/artifacts"), (in_the_database, "")):
        status, message = status_and_message(error, capsys)
        assert status == 1
        assert message.startswith(f"error: the disk is full ({tmp_path}{folder}: 3.0 MB are free)")
        assert "`python -m tasks prune`" in message
        assert message.count("\n") == 1


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str]):
    status, message = status_and_message(KeyboardInterrupt(), capsys)
    assert status == 130
    assert message.startswith("error: interrupted")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_removes_what_is_half_written_and_ends_with_its_status(tmp_path: Path, number: int, status: int):
    program = (
        "import sys, time, pathlib\n"
        "from tasks.pipeline.cli_errors import one_line_errors\n"
        "from tasks.core.files import atomic_folder\n"
        "with one_line_errors(debug=False), atomic_folder(pathlib.Path(sys.argv[1]) / 'train') as folder:\n"
        "    (folder / 'half').write_text('half'); print('writing', flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    process.send_signal(number)
    process.communicate(timeout=300)

    assert process.returncode == status
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "told"),
    [("tell", 141, ""), ("table", 141, ""), ("raise", PASSING_STATUS, "error: BrokenPipeError")],
)
def test_a_reader_that_has_seen_enough_is_no_error_and_a_broken_connection_is(fault: str, status: int, told: str):
    program = (
        "import sys\n"
        "from tasks.pipeline.cli_errors import one_line_errors\n"
        "from tasks.core.console import SafeConsole\n"
        "from tasks.core.terminal import tell\n"
        "printing = {'tell': tell, 'table': SafeConsole().print}\n"
        "with one_line_errors(debug=False):\n"
        "    if sys.argv[1] == 'raise': raise BrokenPipeError(32, 'Broken pipe')\n"
        "    sys.stdin.readline()\n"
        "    while True: printing[sys.argv[1]]('line')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, fault], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None and process.stderr is not None
    if fault != "raise":
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait(timeout=60) == status
    errors = process.stderr.read()
    assert errors.startswith(told) and bool(errors) == bool(told)


def test_what_nohup_started_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with one_line_errors(debug=False):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_no_library_calls_home_from_any_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Either command line, before its command imports anything heavy; a worker's job has them from its deployment."""
    for name in TELEMETRY_OFF:
        monkeypatch.delenv(name, raising=False)
    code = "import os, runpy, sys\ntry: runpy.run_module(sys.argv.pop(1), run_name='__main__')\n"
    code += "finally: print(sorted(os.environ))"
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    for door in (["tasks", "curate"], ["flows", "run"]):  # of a project that is not there
        done = subprocess.run(
            [sys.executable, "-c", code, *door], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert set(TELEMETRY_OFF) <= set(ast.literal_eval(done.stdout.splitlines()[-1])), door


def test_a_value_the_user_set_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    for name in TELEMETRY_OFF:
        monkeypatch.setenv(name, "as I said")
    switch_telemetry_off()
    assert {os.environ[name] for name in TELEMETRY_OFF} == {"as I said"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("run", "--force"), "Add --reason TEXT"),
        (("run", "--force", "--reason", "   "), "Add --reason TEXT"),
        (("approve", "--decline"), "no run was named"),
        (("approve", "--by", "Jane Doe"), "no run was named"),
        (("approve", "--reason", "looked at it"), "no run was named"),
        (("approve", "monday", "--decline"), "an answer needs a reason"),
        (("approve", "monday", "--reason", "  "), "an answer needs a reason"),
        (("approve", "monday", "--reason", "looked at it"), "Run from the project's root"),
    ],
)
def test_a_command_of_the_flows_that_is_not_whole_is_refused_at_once_by_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], said: str
):
    monkeypatch.chdir(tmp_path)  # where nothing is, not even params.yaml
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert said in done.output
    assert done.output.count("\n") == 1
    assert not any(option in done.output for option in ("--withdraw", "promote --force"))
