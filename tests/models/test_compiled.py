"""C is compiled once, never half, and again where anything it depends on differs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tasks.models.native import compiled


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


def test_a_file_that_is_no_library_and_a_folder_that_takes_none_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = compiled.find_compiler()
    assert compiler is not None
    file = tmp_path / f"decode_step-{compiled._key(compiler, 'decode_step', ())}.so"
    file.write_text("no library", encoding="utf-8")
    assert compiled.load_library("decode_step") is None
    monkeypatch.setattr(compiled, "CACHE", Path("/proc/no-folder"))
    assert compiled.load_library("decode_step") is None
