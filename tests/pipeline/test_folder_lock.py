"""One run at a time in a folder: the lock goes with its owner, and a flow shares it with its own stages alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tasks.pipeline.run_lock import FLOW_VARIABLE, SERVE, look_for_owner, only_run, own_token
from tests.conftest import ROOT

HOLD = "import sys, time, pathlib; from tasks.pipeline.run_lock import only_run\n"
HOLD += "with only_run(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"


def owner(folder: Path) -> list[str]:
    """Process id and token."""
    return (folder / ".flow.lock").read_text().split()


@pytest.fixture
def other_run(tmp_path: Path):
    """Another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path, other_run: subprocess.Popen[str]):
    with pytest.raises(ValueError, match=rf"another run \(process {other_run.pid}\)"), only_run(tmp_path):
        pass


def test_who_waits_is_told_which_command_holds_the_folder_and_no_other_text(
    tmp_path: Path, other_run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
):
    pid, token = owner(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tasks", "doctor"])
    with only_run(tmp_path / "elsewhere"):
        command = owner(tmp_path / "elsewhere")[2]
    for noted, told in ((command, f"process {pid}: `doctor`"), ("\x1b[31mrun", f"process {pid}")):
        (tmp_path / ".flow.lock").write_text(f"{pid} {token} {noted}")
        with pytest.raises(ValueError) as error, only_run(tmp_path):
            pass
        assert f"another run ({told}) is at work" in str(error.value)


def test_the_lock_of_a_killed_run_is_free_at_once(tmp_path: Path, other_run: subprocess.Popen[str]):
    other_run.kill()
    other_run.wait()
    with only_run(tmp_path):
        assert owner(tmp_path)[0] == str(os.getpid())


def test_a_stage_works_under_the_lock_of_the_flow_that_started_it(
    tmp_path: Path, other_run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
):
    flow = owner(tmp_path)
    monkeypatch.setenv(FLOW_VARIABLE, flow[1])
    with only_run(tmp_path):
        assert owner(tmp_path) == flow


def test_a_rank_on_another_machine_works_under_the_lock_of_its_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A namespace of process ids stands for the machine; where it is not allowed, an id that nobody has."""
    held = "with only_run(pathlib.Path(sys.argv[1])): print('held', flush=True)"
    elsewhere = ["unshare", "-Ur", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        elsewhere = []
    with only_run(tmp_path):
        monkeypatch.setenv(FLOW_VARIABLE, own_token())
        if not elsewhere:
            (tmp_path / ".flow.lock").write_text(f"99999999 {own_token()}")
        command = [*elsewhere, sys.executable, "-c", HOLD.splitlines()[0] + "\n" + held, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "held\n"), done.stderr


def test_a_variable_left_over_from_another_flow_opens_nothing(
    tmp_path: Path, other_run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
):
    """Nor does the process id of the one that is at work, nor no token where there is none."""
    for left_over in (own_token(), str(other_run.pid), ""):
        monkeypatch.setenv(FLOW_VARIABLE, left_over)
        with pytest.raises(ValueError, match="another run"), only_run(tmp_path):
            pass
    (tmp_path / ".flow.lock").write_text(str(other_run.pid))
    with pytest.raises(ValueError, match="another run"), only_run(tmp_path):
        pass


def test_what_a_dead_flow_left_running_has_the_lock_itself(
    tmp_path: Path, other_run: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(FLOW_VARIABLE, owner(tmp_path)[1])
    other_run.kill()
    other_run.wait()
    with only_run(tmp_path):
        monkeypatch.delenv(FLOW_VARIABLE)
        started = time.monotonic()
        other = [sys.executable, "-c", f"import tasks.pipeline.run_lock as l; l.HANDOVER_SECONDS = 0.1\n{HOLD}"]
        done = subprocess.run([*other, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert "another run" in done.stderr and time.monotonic() - started < 30


def test_two_folders_do_not_know_each_other(tmp_path: Path, other_run: subprocess.Popen[str]):
    with only_run(tmp_path / "elsewhere"):
        pass


def test_a_schedule_has_a_lock_of_its_own_beside_the_run_that_it_starts(
    tmp_path: Path, other_run: subprocess.Popen[str]
):
    with only_run(tmp_path, SERVE):
        assert owner(tmp_path)[0] == str(other_run.pid)


def test_who_looks_sees_an_owner_and_where_none_is_it_keeps_one_waiting_and_refuses_none(tmp_path: Path):
    with only_run(tmp_path, SERVE), look_for_owner(tmp_path, SERVE) as is_owned:
        assert is_owned
    taken: list[int] = []

    def take() -> None:
        with only_run(tmp_path, SERVE) as descriptor:
            taken.append(descriptor)

    other = threading.Thread(target=take)
    (tmp_path / ".serve.lock").write_text(str(os.getppid()))  # of the last owner; by now another process has its id
    with look_for_owner(tmp_path, SERVE) as is_owned, look_for_owner(tmp_path, SERVE) as is_owned_for_a_second:
        other.start()
        time.sleep(0.2)
        assert (is_owned, is_owned_for_a_second, taken) == (False, False, [])
    other.join()
    assert len(taken) == 1
