"""Files appear whole or not at all, hashes are of content only, and what cannot be read is named by file and line.

Kills and full disks are real here: a killed process, a tmpfs of 64 KiB, a file-size limit of the kernel.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import (
    atomic_file,
    atomic_folder,
    content_hash,
    file_hash,
    is_disk_full,
    json_hash,
    natural_order,
    numbered_folders,
    read_json,
    read_jsonl,
    require,
    write_json,
    write_jsonl,
    write_text,
)
from tasks.core.targets import remove_leftovers

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_names_sort_by_the_numbers_in_them(tmp_path: Path) -> None:
    names_there = ["iteration-9999", "iteration-10000", "iteration-0500", "iteration-0010 (copy)", "iteration-final"]
    for name in names_there:
        (tmp_path / name).mkdir()
    assert [item.name for item in numbered_folders(tmp_path)] == ["iteration-0500", "iteration-9999", "iteration-10000"]
    assert sorted(["b2", "a10", "b", "a9"], key=natural_order) == ["a9", "a10", "b", "b2"]


@pytest.mark.parametrize("look", [content_hash, numbered_folders])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], Any], number: int
) -> None:
    """An empty one has another hash, and no checkpoint: a stage would start over."""
    (tmp_path / "iteration-1").mkdir()

    def fail(place: Any) -> None:
        raise OSError(number, os.strerror(number), str(place))

    monkeypatch.setattr(os, "scandir", fail)
    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        look(tmp_path)
    assert numbered_folders(tmp_path / "none") == []


def test_rows_come_back_as_they_were_written_with_their_line_numbers(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"city": "Tōkyō"}, {"n": [1, 2.5, None]}])
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [(1, {"city": "Tōkyō"}), (2, {"n": [1, 2.5, None]})]


def test_an_empty_line_is_skipped_and_still_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}')
    assert [number for number, _ in read_jsonl(tmp_path / "a.jsonl")] == [1, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": ]\n', r"a\.jsonl, line 2: not valid JSON \(Expecting value at column 7\)"),
        ('{"a": 1}\n[1]\n', r"a\.jsonl, line 2: expected one JSON object, found list"),
        ('{"a": 1}\n{"a": 1', r"a\.jsonl, line 2: not valid JSON"),
        ("null\n", r"a\.jsonl, line 1: expected one JSON object, found NoneType"),
    ],
)
def test_a_torn_or_foreign_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        list(read_jsonl(tmp_path / "a.jsonl"))
    assert "\n" not in str(caught.value)


def test_a_file_in_another_encoding_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"a": 1}\n{"a": "é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"line 2: not UTF-8 .* Save the file as UTF-8"):
        list(read_jsonl(tmp_path / "a.jsonl"))


def test_equal_values_are_equal_files_whatever_the_order_of_their_keys(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": [1.5]})
    write_json(tmp_path / "b.json", {"a": [1.5], "b": 1})
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert read_json(tmp_path / "a.json") == {"a": [1.5], "b": 1}


def test_nan_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", float("nan"))
    with pytest.raises(ValueError):
        write_jsonl(tmp_path / "a.json", [{"a": 1}, {"a": float("inf")}])
    assert read_json(tmp_path / "a.json") == 1
    assert names(tmp_path) == ["a.json"]


def test_a_file_that_fails_halfway_leaves_the_old_one_and_no_rest(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_text(target, "old")

    def fail_halfway() -> None:
        with atomic_file(target) as temporary:
            temporary.write_text("half")
            assert target.read_text() == "old"
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127 + "n", "n" * 200])
def test_a_file_may_have_the_longest_name_there_is(tmp_path: Path, name: str) -> None:
    with atomic_file(tmp_path / name) as one, atomic_file(tmp_path / f"m{name[1:]}") as two:
        one.write_bytes(b"1")
        two.write_bytes(b"2")
        assert {item.suffix for item in tmp_path.iterdir()} == {".partial"}
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == {name: b"1", f"m{name[1:]}": b"2"}


def test_a_folder_takes_the_place_of_the_old_one_whole(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    for content in ("one", "two"):
        with atomic_folder(folder) as temporary:
            (temporary / content).write_text(content)
    assert names(folder) == ["two"]

    def fail_halfway() -> None:
        with atomic_folder(folder) as temporary:
            (temporary / "three").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert names(folder) == ["two"]
    assert names(folder.parent) == ["out"]


def test_a_process_killed_while_writing_leaves_the_old_file_and_folder(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("old")
    code = """
import os, signal, sys
from pathlib import Path
from typing import Any
from tasks.core.files import atomic_file, atomic_folder
base = Path(sys.argv[1])
with atomic_folder(base / "out") as folder, atomic_file(base / "a.txt") as file:
    (folder / "half").write_text("half")
    file.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code, tmp_path).returncode == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path / "out") == ["kept"]
    with atomic_folder(tmp_path / "out") as temporary:
        (temporary / "new").write_text("new")
    assert names(tmp_path / "out") == ["new"]


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    """A web server's folder, or a shared file: whoever looks behind the link sees the new one."""
    web, shared = tmp_path / "web" / "root", tmp_path / "shared" / "rows.jsonl"
    for file in (web / "index.html", shared):
        write_text(file, "old")
    (tmp_path / "report").symlink_to("web/root")
    (tmp_path / "rows.jsonl").symlink_to(shared)
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    for name in ("report", "dangling"):
        with atomic_folder(tmp_path / name) as temporary:
            (temporary / "index.html").write_text("new")
    write_text(tmp_path / "rows.jsonl", "new")
    assert [file.read_text() for file in (web / "index.html", shared, tmp_path / "later" / "index.html")] == ["new"] * 3
    assert all((tmp_path / name).is_symlink() for name in ("report", "rows.jsonl", "dangling"))
    assert names(tmp_path) == ["dangling", "later", "report", "rows.jsonl", "shared", "web"]
    assert (names(web.parent), names(shared.parent)) == (["root"], ["rows.jsonl"])


def test_a_cache_behind_a_link_is_never_written(tmp_path: Path) -> None:
    """DVC's links lead to files that nobody may write."""
    cached = tmp_path / "cache"
    cached.write_text("old")
    cached.chmod(0o444)
    (tmp_path / "a.txt").symlink_to(cached)
    write_text(tmp_path / "a.txt", "new")
    assert (cached.read_text(), (tmp_path / "a.txt").read_text()) == ("old", "new")


KILL_BETWEEN_RENAMES = """
import os, signal, sys
from pathlib import Path
from typing import Any
from tasks.core.files import atomic_folder
rename = os.replace
def stop(source: Any, target: Any) -> None:
    rename(source, target)
    if Path(target).suffix == ".replaced":
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else sys.exit(3)
os.replace = stop
with atomic_folder(Path(sys.argv[1]) / "[out].1") as folder:
    (folder / "new").write_text("new")
"""


@pytest.mark.parametrize("way", ["killed", "stopped"])
@pytest.mark.parametrize("then", ["write", "leftovers"])
def test_a_folder_whose_replacement_was_cut_between_its_renames_is_put_back(
    tmp_path: Path, way: str, then: str
) -> None:
    out = tmp_path / "[out].1"
    out.mkdir()
    (out / "kept").write_text("old")
    assert run_python(KILL_BETWEEN_RENAMES, tmp_path, way).returncode == (-signal.SIGKILL if way == "killed" else 3)
    assert out.exists() == (way == "stopped")
    if then == "leftovers":
        remove_leftovers(tmp_path)
        assert names(tmp_path) == ["[out].1"]
    else:
        with pytest.raises(KeyError), atomic_folder(out):
            raise KeyError
    assert names(out) == ["kept"]


FILL = """
import resource, sys
from pathlib import Path
from typing import Any
from tasks.core.files import atomic_folder, is_disk_full, write_jsonl
base, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
rows = ({"i": i, "text": "x" * 1000} for i in range(1000))
try:
    if sys.argv[3] == "file":
        write_jsonl(base / "rows.jsonl", rows)
    else:
        with atomic_folder(base / "out") as folder:
            write_jsonl(folder / "rows.jsonl", rows)
except OSError as error:
    print(type(error).__name__, is_disk_full(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_write_the_kernel_stops_leaves_what_was_there(tmp_path: Path, kind: str) -> None:
    write_text(tmp_path / "rows.jsonl", '{"i": 0}\n')
    (tmp_path / "out").mkdir()
    before = names(tmp_path)
    assert run_python(FILL, tmp_path, 64 * 1024, kind).stdout.startswith("OSError")
    assert names(tmp_path) == before
    assert list(read_jsonl(tmp_path / "rows.jsonl")) == [(1, {"i": 0})]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root; the file-size limit above covers the rest")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_full_disk_is_told_apart_and_leaves_what_was_there(small_disk: Path, kind: str) -> None:
    write_text(small_disk / "rows.jsonl", '{"i": 0}\n')
    (small_disk / "out").mkdir()
    (small_disk / "out" / "kept").write_text("old")
    assert run_python(FILL, small_disk, 0, kind).stdout == "OSError True\n"
    assert names(small_disk) == ["out", "rows.jsonl"]
    assert names(small_disk / "out") == ["kept"]
    assert list(read_jsonl(small_disk / "rows.jsonl")) == [(1, {"i": 0})]


def test_the_device_that_is_always_full_says_so_and_other_errors_do_not() -> None:
    with pytest.raises(OSError) as caught, open("/dev/full", "w") as stream:
        stream.write("x" * 100_000)
    assert is_disk_full(caught.value)
    assert not is_disk_full(FileNotFoundError(2, "missing"))
    assert not is_disk_full(ValueError("full"))


def test_a_hash_is_of_names_and_bytes_and_not_of_the_place(tmp_path: Path) -> None:
    for place in ("here", "there/deeper"):
        write_text(tmp_path / place / "x" / "a.txt", "1")
        write_text(tmp_path / place / "b.txt", "2")
    here, there = tmp_path / "here", tmp_path / "there" / "deeper"
    assert content_hash(here) == content_hash(there)
    assert content_hash(here / "b.txt") == content_hash(there / "b.txt")
    (there / "b.txt").rename(there / "c.txt")
    assert content_hash(here) != content_hash(there)
    assert content_hash(here, ignore=lambda path: path.name == "b.txt") == content_hash(
        there, ignore=lambda path: path.name == "c.txt"
    )
    write_text(here / "x" / "a.txt", "3")
    assert content_hash(here, ignore=lambda path: path.name == "b.txt") != content_hash(there)


def test_two_files_cannot_trade_bytes_across_their_border_and_keep_the_hash(tmp_path: Path) -> None:
    for place, first, second in (("one", "ab", "c"), ("two", "a", "bc")):
        write_text(tmp_path / place / "1", first)
        write_text(tmp_path / place / "2", second)
    assert content_hash(tmp_path / "one") != content_hash(tmp_path / "two")


def test_a_json_hash_ignores_the_order_of_keys_and_nothing_else() -> None:
    assert json_hash({"a": 1, "b": [1, 2]}) == json_hash({"b": [1, 2], "a": 1})
    assert json_hash({"a": [1, 2]}) != json_hash({"a": [2, 1]})
    assert json_hash({"a": 1}) != json_hash({"a": "1"})


def test_a_missing_input_names_the_stage_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Run `dvc repro` first.*`python -m tasks curate` alone"):
        require(tmp_path / "curate" / "train.jsonl")
    with pytest.raises(ValueError, match=r"Run `dvc repro` first.*`python -m tasks train` alone"):
        require(tmp_path / "x", made_by="train")
    with pytest.raises(ValueError, match=r"does not exist.*Check the path"):
        require(tmp_path / "x")
    assert require(tmp_path) == tmp_path


@pytest.mark.slow
def test_a_reader_beside_a_writer_never_sees_half_a_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", [0] * 5000)
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import itertools, sys\nfrom pathlib import Path\nfrom tasks.core.files import write_json\n"
            "for n in itertools.takewhile(lambda _: not Path(sys.argv[2]).exists(), itertools.count()):\n"
            "    write_json(Path(sys.argv[1]), [n] * 5000)",
            str(tmp_path / "a.json"),
            str(tmp_path / "enough"),
        ],
        cwd=ROOT,
    )
    seen = set[int]()
    while len(seen) < 100 and writer.poll() is None:
        value = json.loads((tmp_path / "a.json").read_text())
        assert len(value) == 5000
        assert len(set(value)) == 1
        seen.add(value[0])
    (tmp_path / "enough").touch()
    assert writer.wait(300) == 0
    assert sorted(os.listdir(tmp_path)) == ["a.json", "enough"]


def write_long_ago(file: Path, content: bytes, *, seconds: int = 60) -> None:
    file.write_bytes(content)
    time = file.stat().st_mtime - seconds
    os.utime(file, (time, time))


def test_a_file_is_read_once_while_it_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    counted = hashlib.file_digest

    def digest_of(stream: Any, name: str) -> Any:
        read.append(stream.name)
        return counted(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", digest_of)
    file = tmp_path / "model.safetensors"
    write_long_ago(file, b"one")
    assert [file_hash(file) for _ in range(3)] == [hashlib.sha256(b"one").hexdigest()] * 3
    monkeypatch.chdir(tmp_path)
    assert content_hash(Path(file.name)) == content_hash(file)
    assert read == [str(file)]


@pytest.mark.parametrize("seconds", [60, 30])
def test_a_file_of_the_same_size_that_changed_is_read_again(tmp_path: Path, seconds: int) -> None:
    """By its time, and where that was set back, by its inode."""
    file, other = tmp_path / "a", tmp_path / "b"
    write_long_ago(file, b"one")
    file_hash(file)
    write_long_ago(other, b"two", seconds=seconds)
    os.replace(other, file)
    assert file_hash(file) == hashlib.sha256(b"two").hexdigest()


def test_a_file_that_was_just_written_is_read_again_since_its_time_may_stay_the_same(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one")
    time = file.stat().st_mtime_ns
    file_hash(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(time, time))
    assert file_hash(file) == hashlib.sha256(b"two").hexdigest()


def test_a_large_file_is_hashed_in_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as stream:
        stream.truncate(64 << 20)
    tracemalloc.start()
    file_hash(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20
