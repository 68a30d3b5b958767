"""DVC's cache as `.dvc/config` sets it: results are links into it, or copies where there are no links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.files import write_text
from tests.conftest import ROOT

pytestmark = pytest.mark.slow
STAGE = """
stages:
  train:
    cmd: python -c "open('weights', 'w').write('1' * 9)"
    outs: [weights]
"""
MEMORY = Path("/dev/shm")


def dvc(project: Path, *arguments: str) -> str:
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "DVC_SITE_CACHE_DIR": str(project / "site"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments],
        cwd=project, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    dvc(tmp_path, "init", "--no-scm", "--quiet")
    shutil.copy(ROOT / ".dvc" / "config", tmp_path / ".dvc" / "config")
    dvc(tmp_path, "config", "core.no_scm", "true")
    (tmp_path / "dvc.yaml").write_text(STAGE, encoding="utf-8")
    return tmp_path


def cached(cache: Path) -> Path:
    (found,) = (item for item in (cache / "files").rglob("*") if item.is_file())
    return found


def test_a_result_is_stored_once_and_a_stage_that_replaces_it_leaves_the_cache_alone(project: Path) -> None:
    dvc(project, "repro")
    kept = cached(project / ".dvc" / "cache")
    assert (project / "weights").stat().st_ino == kept.stat().st_ino or kept.stat().st_nlink == 1  # a reflink
    assert "up to date" in dvc(project, "repro")
    write_text(project / "weights", "other")
    assert kept.read_text() == "1" * 9
    dvc(project, "checkout", "--force")
    assert (project / "weights").read_text() == "1" * 9


@pytest.mark.skipif(not MEMORY.is_dir(), reason="there is no second file system to test with")
def test_a_cache_that_no_link_reaches_gets_copies(project: Path) -> None:
    place = MEMORY / f"turnwise-test-{os.getpid()}"
    if project.stat().st_dev == MEMORY.stat().st_dev:
        pytest.skip("both are one file system")
    try:
        dvc(project, "cache", "dir", "--local", str(place))
        dvc(project, "repro")
        kept = cached(place)
        assert (kept.stat().st_nlink, (project / "weights").read_text()) == (1, "1" * 9)
        assert "up to date" in dvc(project, "repro")
    finally:
        shutil.rmtree(place, ignore_errors=True)
