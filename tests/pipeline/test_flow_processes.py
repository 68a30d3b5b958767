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

from flows.processes import only_flow, plain, run_streamed
from flows.server import Server
from flows.supervisor import _wait
from tasks.core.child_processes import ChildProcess, Guardian

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
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from flows import __main__, server
from flows.processes import run_streamed
from tasks.core.child_processes import ChildProcess, Guardian
hangs_seconds, server.UNWIND_SECONDS = float(sys.argv[1]), float(sys.argv[2])
sleep = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]

class Sleeping(server.Server):
    def wait_until_up(self):
        print(self.process.pid, flush=True)

def start_server(*, with_scheduler):
    return Sleeping("http://127.0.0.1:1/api", ChildProcess(sleep, log=Path("server.log")))

def retrain(**asked):
    try:
        run_streamed(sleep, env=os.environ, guardian=Guardian(), on_line=lambda line: True, is_terminal=False)
    finally:
        time.sleep(hangs_seconds)

server.start_server, __main__._prepare = start_server, lambda held, shows_log: None
__main__._tell_unchanged, __main__._load_ahead = lambda: False, lambda held: None
sys.modules["flows.retrain"] = SimpleNamespace(retrain=retrain)
__main__.run()
"""


@pytest.mark.parametrize(("hangs_seconds", "unwind_seconds"), [(0, 600), (600, 1)])
def test_a_run_whose_server_dies_ends_its_stage_and_itself_with_one_line_and_status_1(
    tmp_path: Path, hangs_seconds: float, unwind_seconds: float
):
    """Also where Prefect hangs on the way out: it asks a server that is gone for five minutes."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    flow = subprocess.Popen(
        [PYTHON, "-c", WATCHER, str(hangs_seconds), str(unwind_seconds)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert flow.stdout is not None
    assert flow.stdout.readline() == "flow: its server and libraries start\n"
    server, stage = int(flow.stdout.readline()), int(flow.stdout.readline())
    os.kill(server, signal.SIGKILL)
    _, errors = flow.communicate(timeout=300)
    assert flow.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith(f"error: Prefect's server (process {server}) was ended by signal 9")
    assert "promotes nothing" in line
    assert wait_until(lambda: not is_running(stage))


def test_serve_ends_with_one_line_when_its_server_or_its_schedule_is_gone(tmp_path: Path):
    process = ChildProcess(["sh", "-c", "echo no room; exec sleep 600"], log=tmp_path / "serve.log")
    server = Server("http://127.0.0.1:1/api", process)
    assert wait_until(lambda: process.last_lines() == ["no room"])
    schedule, refused = ChildProcess(["sleep", "600"]), ChildProcess([PYTHON, "-c", "raise SystemExit(3)"])
    refused.wait()  # and has said why
    with pytest.raises(SystemExit) as end:
        _wait(server, refused)
    assert end.value.code == 3
    process.process.kill()
    process.wait()
    with pytest.raises(ValueError, match=rf"server \(process {process.pid}\) was ended by signal 9, so the schedule"):
        _wait(server, schedule)
    schedule.process.kill()
    schedule.wait()
    with pytest.raises(ValueError, match=rf"schedule \(process {schedule.pid}\) was ended by signal 9"):
        _wait(server, schedule)
    for child in (process, schedule, refused):
        child.stop()
