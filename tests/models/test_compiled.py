"""C is compiled once, never half, and again where anything it depends on differs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tasks.models.native import compiled
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "CACHE", tmp_path)
    monkeypatch.setattr(compiled, "load_library", compiled.load_library.__wrapped__)


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled_and_other_flags_are_compiled_apart(tmp_path: Path) -> None:
    assert compiled.load_library("decode_step") is not None
    (first,) = tmp_path.iterdir()
    written = first.stat().st_mtime_ns
    assert compiled.load_library("decode_step") is not None
    assert [file.stat().st_mtime_ns for file in tmp_path.iterdir()] == [written]
    assert compiled.load_library("decode_step", "WIDTH=16") is not None
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_several_that_compile_at_once_leave_one_whole_library(tmp_path: Path) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(compiled.load_library("decode_step"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in found
    assert len(found) == 3
    assert [file.suffix for file in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize("name", ["no_such_source", "../native/../../secret"])
def test_what_does_not_compile_is_no_library_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    assert compiled.load_library(name) is None
    assert list(tmp_path.rglob("*.so")) == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100, 4096, 8192, -40, -1])
def test_a_library_that_was_cut_short_is_compiled_anew(size: int, tmp_path: Path) -> None:
    """To load one with a page missing ends the process with SIGBUS; so this one loads it in another."""
    assert compiled.load_library("decode_step") is not None
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(whole[:size])
    cut.replace(file)  # not in place: this process has it loaded
    assert not compiled._is_whole(file)
    code = (
        "import sys; from pathlib import Path; from tasks.models.native import compiled;"
        "compiled.CACHE = Path(sys.argv[1]); print(compiled.load_library('decode_step') is not None)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert compiled._is_whole(file)


def stand_in(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def test_a_compiler_that_fails_leaves_the_next_one_its_turn_and_else_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, cache = tmp_path / "programs", tmp_path / "cache"
    monkeypatch.setattr(compiled, "CACHE", cache)
    stand_in(programs, "cc", "echo 'x.c:1: fatal error: no stdio.h' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(compiled, "FLAGS", tuple(flag for flag in compiled.FLAGS if flag != "-O3"))  # quicker
    assert compiled.load_library("tree_attention") is not None
    assert compiled.fault_of("tree_attention") is None
    monkeypatch.setenv("PATH", f"{programs}")
    assert compiled.load_library("tree_attention") is None
    assert str(compiled.fault_of("tree_attention")).endswith("programs/cc: x.c:1: fatal error: no stdio.h")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(compiled, "_FAULTS", {})
    assert compiled.fault_of("tree_attention") == "there is none"


def test_a_compiler_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    stand_in(programs, "cc", f"/bin/sleep 1000 & echo $! > {tmp_path}/pid; wait")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(compiled, "SECONDS", 0.5)
    monkeypatch.setattr(compiled, "CACHE", tmp_path / "cache")
    assert compiled.load_library("decode_step") is None
    assert str(compiled.fault_of("decode_step")).endswith("did not end within 0 s")
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert list((tmp_path / "cache").rglob("*")) == []


def test_a_folder_that_takes_none_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "CACHE", Path("/proc/no-folder"))
    assert compiled.load_library("decode_step") is None


IN_NOEXEC = """
mount -t tmpfs -o noexec tmpfs "$1" && cd "$2" && exec "$3" -c "
import sys
from pathlib import Path
from tasks.models.native import compiled
compiled.CACHE = Path('$1')
print(compiled.load_library('tree_attention'), compiled.fault_of('tree_attention'))"
"""


@pytest.mark.slow
def test_a_folder_from_which_nothing_is_loaded_gives_none_and_says_so(tmp_path: Path) -> None:
    """As Docker mounts a tmpfs."""
    command = ["unshare", "-Urm", "bash", "-c", IN_NOEXEC, "bash", str(tmp_path), str(ROOT), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this machine lets nobody mount a file system: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None ") and f"{tmp_path} is mounted noexec" in done.stdout
