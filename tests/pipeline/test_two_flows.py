"""Two flows in the same moment: the second is told that another run is at work before it starts anything, and ends or
waits, as `pipeline.on_busy` says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from flows.__main__ import _prepare
from tests.conftest import ROOT
from tests.profiles import profile_params, profile_text

pytestmark = pytest.mark.slow

# As far as a flow gets before it starts its server: the lock was free again from here until the flow proper began.
STARTING = """
import sys
from contextlib import ExitStack
import flows.__main__
from flows.__main__ import _prepare
flows.__main__.LOOK_SECONDS = 0.2
with ExitStack() as held:
    _prepare(held, shows_log=False)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that a flow would start in: the test profile, and every file it names."""
    (tmp_path / "params.yaml").write_text(profile_text("test"), encoding="utf-8")
    params = profile_params("test")
    for named in (params["model"]["path"], params["curate"]["source"]):
        (tmp_path / named).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / named).touch()
    (tmp_path / ".git").mkdir()
    return tmp_path


@pytest.fixture
def first(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with starting(folder) as process:
        yield process


@contextmanager
def starting(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING], cwd=folder, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_flow_that_starts_while_another_starts_is_refused_in_one_line(
    folder: Path, first: subprocess.Popen[str]
) -> None:
    assert first.stdout is not None and first.stdout.readline() == "ready\n"
    second = subprocess.run(
        [sys.executable, "-m", "flows", "run"], cwd=folder, env=environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert second.returncode == 1
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"error: artifacts: another run (process {first.pid}) is at work in this folder")
    assert not (folder / "artifacts" / ".prefect" / "server.log").exists()


def test_a_flow_that_shall_wait_says_so_once_and_begins_where_the_other_ended(
    folder: Path, first: subprocess.Popen[str]
) -> None:
    assert first.stdout is not None and first.stdout.readline() == "ready\n"
    file = folder / "params.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("on_busy: skip", "on_busy: wait"), encoding="utf-8")
    with starting(folder) as second:
        assert second.stdout is not None
        assert f"another run (process {first.pid}) is at work in this folder" in second.stdout.readline()
        first.communicate("")
        assert second.stdout.readline() == "ready\n"


@pytest.mark.parametrize("is_told", [False, True])
def test_a_folder_without_git_is_refused_unless_dvc_was_told_so(folder: Path, is_told: bool) -> None:
    (folder / ".git").rmdir()
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text("[core]\n    no_scm = true\n" if is_told else "", encoding="utf-8")
    with starting(folder) as flow:
        told, errors = flow.communicate("", timeout=300)
    assert told == ("ready\n" if is_told else "")
    assert is_told or "Run `git init`, or `dvc config --local core.no_scm true`" in errors.splitlines()[-1]


def test_deploy_asks_for_nothing_of_this_machine_since_it_runs_nothing_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".git").rmdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = folder / "params.yaml"
    text = file.read_text(encoding="utf-8")
    assert "device: cpu" in text
    file.write_text(text.replace("device: cpu", "device: cuda"), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ})
        _prepare(None, shows_log=False)
        with ExitStack() as held, pytest.raises(ValueError, match="no CUDA device"):
            _prepare(held, shows_log=False)
