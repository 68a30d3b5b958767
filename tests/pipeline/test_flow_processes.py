"""Children of a flow: what they write arrives as they write it, and none outlives its flow, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows.processes import Guardian, only_flow, plain, run_streamed

pytestmark = pytest.mark.slow

PYTHON = sys.executable


def run_python(code: str, *, is_terminal: bool = False, show: Callable[[str], bool] = lambda line: True) -> int:
    guardian = Guardian()
    try:
        return run_streamed(
            [PYTHON, "-c", code], env=os.environ, guardian=guardian, on_line=show, is_terminal=is_terminal
        )
    finally:
        guardian.close()


def wait_until(is_true: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true()


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_lines_of_both_streams_arrive_in_order_and_the_status_comes_back(capfd):
    lines: list[str] = []
    code = "import os; os.write(1, b'one\\n'); os.write(2, b'two\\n'); os.write(1, b'three'); os._exit(3)"
    assert run_python(code, show=lambda line: not lines.append(line)) == 3  # type: ignore[func-returns-value]
    assert lines == ["one", "two", "three"]
    assert capfd.readouterr().out == "one\ntwo\nthree\n"


def test_a_line_is_seen_while_the_child_is_still_at_work(tmp_path: Path):
    """It stays at work until whoever sees the line has made a file."""
    seen = tmp_path / "seen"
    code = f"""
import pathlib, time
print("now", flush=True)
while not pathlib.Path({str(seen)!r}).exists():
    time.sleep(0.1)
"""
    assert run_python(code, show=lambda line: bool(seen.touch())) == 0  # type: ignore[func-returns-value]


def test_lines_nobody_wants_are_left_out(capfd):
    run_python("print('keep'); print('drop'); print('keep too')", show=lambda line: line != "drop")
    assert capfd.readouterr().out == "keep\nkeep too\n"


def test_with_a_terminal_the_child_sees_one_and_its_bar_is_passed_on_byte_by_byte(capfdbinary):
    code = """
import sys
assert sys.stdout.isatty() and sys.stderr.isatty()
print("10%\\r20%\\r", end="")
print("\\x1b[32mdone")
"""
    assert run_python(code, is_terminal=True) == 0
    assert capfdbinary.readouterr().out == b"10%\r20%\r\x1b[32mdone\n"


def test_with_a_terminal_unwanted_lines_go_but_their_control_sequences_stay(capfdbinary):
    code = "print('work'); print('\\x1b[?25hUpdating lock file'); print('rest')"
    run_python(code, is_terminal=True, show=lambda line: not line.startswith("Updating"))
    assert capfdbinary.readouterr().out == b"work\n\x1b[?25hrest\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [(b"\x1b[31mred\x1b[0m\r", "red"), (b"10%\r\x1b[2K20%", "20%"), ("é".encode(), "é"), (b"\xff", "\ufffd")],
)
def test_a_logged_line_is_what_a_reader_would_see_at_the_end(line: bytes, text: str):
    assert plain(line) == text


def test_what_a_child_leaves_running_ends_with_its_step(tmp_path: Path):
    code = f"""
import subprocess, pathlib
child = subprocess.Popen(["sleep", "600"])
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
"""
    started = time.monotonic()
    assert run_python(code) == 0
    assert time.monotonic() - started < 300  # the sleeper holds the pipe open; nobody waits for that
    assert wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_an_error_while_streaming_ends_the_child():
    def interrupt(line: str) -> bool:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_python("import time; print('go', flush=True); time.sleep(600)", show=interrupt)
    assert time.monotonic() - started < 300


def test_a_child_that_ignores_being_asked_is_made_to_end():
    def interrupt(line: str) -> bool:
        raise KeyboardInterrupt

    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('go', flush=True); time.sleep(600)"
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_python(code, show=interrupt)
    assert 1.5 < time.monotonic() - started < 300


HOLDER = """
import os, sys, time
from pathlib import Path
from flows.processes import only_flow, run_streamed
with only_flow(Path("artifacts")) as guardian:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    command = [sys.executable, "-c", code]
    run_streamed(command, env=os.environ, guardian=guardian, on_line=lambda line: True, is_terminal=False)
"""


def test_kill_9_of_a_flow_ends_its_children_and_frees_the_folder(tmp_path: Path, monkeypatch):
    root = Path(__file__).resolve().parents[2]
    flow = subprocess.Popen(
        [PYTHON, "-c", HOLDER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert flow.stdout is not None
    child = int(flow.stdout.readline())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"another run .process {flow.pid}. is at work in this folder"):
        only_flow(Path("artifacts")).__enter__()
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    flow.stdout.close()
    with only_flow(Path("artifacts")):  # waits for the guardian, and not for longer
        assert not is_running(child)


WATCHER = """
import os, subprocess, sys, time
from pathlib import Path
from flows import server
from flows.processes import Guardian, run_streamed
from tasks.command_line import one_line_errors
server.UNWIND_SECONDS = 1.0
sleep = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
with open("server.log", "w") as log:
    prefect = subprocess.Popen(sleep, stdout=log, start_new_session=True)
server.Server("http://127.0.0.1:1/api", prefect, Path("server.log")).end_this_process_with_it()
with one_line_errors(debug=False):
    try:
        print(prefect.pid, flush=True)
        run_streamed(sleep, env=os.environ, guardian=Guardian(), on_line=lambda line: True, is_terminal=False)
    finally:
        time.sleep(600)  # as Prefect does, which asks a server that is gone for five minutes
"""


def test_a_flow_whose_server_dies_ends_its_stage_and_itself_with_one_line(tmp_path: Path):
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    flow = subprocess.Popen(
        [PYTHON, "-c", WATCHER],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert flow.stdout is not None
    server, stage = int(flow.stdout.readline()), int(flow.stdout.readline())
    os.kill(server, signal.SIGKILL)
    _, errors = flow.communicate(timeout=300)
    assert flow.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith(f"error: Prefect's server (process {server}) was ended by signal 9")
    assert "promotes nothing" in line
    assert wait_until(lambda: not is_running(stage))


def test_a_guardian_leaves_alone_what_ended_in_peace(tmp_path: Path):
    """Its process number may name somebody else's by then."""
    bystander = subprocess.Popen(["sleep", "100"], start_new_session=True)
    guardian = Guardian()
    guardian.watch(bystander.pid)
    guardian.forget(bystander.pid)
    guardian.close()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
