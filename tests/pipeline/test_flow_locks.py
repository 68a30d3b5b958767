"""What `kill -9` of DVC leaves behind never blocks the next flow, and what a living DVC holds is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.dead_locks import release_dead_locks

RWLOCK = Path(".dvc/tmp/rwlock")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    RWLOCK.parent.mkdir(parents=True)
    return tmp_path


def held_by(pid: int) -> str:
    holder = {"pid": pid, "cmd": "dvc repro --single-item train"}
    return json.dumps({"write": {"artifacts/train": holder}, "read": {"artifacts/curate": [holder]}})


def test_a_folder_dvc_never_ran_in_is_left_as_it_is(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    release_dead_locks()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_process_that_is_gone_is_taken_back(folder: Path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    RWLOCK.write_text(held_by(ended.pid), encoding="utf-8")
    release_dead_locks()
    assert not RWLOCK.exists()


def test_so_is_one_whose_number_names_another_program_by_now(folder: Path):
    RWLOCK.write_text(held_by(os.getpid()), encoding="utf-8")
    release_dead_locks()
    assert not RWLOCK.exists()


@pytest.mark.parametrize("text", ["", '{"write": {"artif', "[]"])
def test_a_lock_file_that_was_cut_short_is_removed(folder: Path, text: str):
    RWLOCK.write_text(text, encoding="utf-8")
    release_dead_locks()
    assert not RWLOCK.exists()


def test_the_lock_of_a_living_dvc_is_kept(folder: Path):
    dvc = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", "/bin/dvc"])
    try:
        RWLOCK.write_text(held_by(dvc.pid), encoding="utf-8")
        release_dead_locks()
        assert RWLOCK.exists()
    finally:
        dvc.kill()
        dvc.wait()


def test_a_dvc_lock_that_was_cut_short_is_removed_and_a_whole_one_is_kept(folder: Path):
    lock = Path("dvc.lock")
    lock.write_text("schema: '2.0'\nstages:\n  curate:\n    cmd: x\n", encoding="utf-8")
    release_dead_locks()
    assert lock.exists()
    lock.write_text("schema: '2.0'\nstages:\n  curate: {cmd: 'py", encoding="utf-8")
    release_dead_locks()
    assert not lock.exists()
