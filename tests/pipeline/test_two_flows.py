"""Two flows in the same moment: the second is told that another run is at work before it starts anything, and ends or
waits, as `pipeline.on_busy` says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
    return tmp_path


@pytest.fixture
def first(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with starting(folder) as process:
        yield process


@contextmanager
def starting(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING], cwd=folder, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
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
