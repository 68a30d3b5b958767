"""A folder on S3 is whole or the one before: with a real server, and a proxy that cuts, alters, refuses and waits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tasks.core.urls import S3Url, parse_url
from tasks.storage import folders
from tasks.storage.client import Changed, Store, connect
from tasks.storage.folders import MANIFEST, files_below, get_folder, put_folder
from tests.storage.fault_proxy import FaultProxy, answering
from tests.storage.places import SETTINGS, Place

pytestmark = pytest.mark.slow
BIG = 12_000_000  # bytes; sent in two parts


def made(folder: Path, **texts: bytes) -> dict[str, Path]:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return files_below(folder)


def read(store: Store, url: S3Url, target: Path) -> dict[str, bytes]:
    get_folder(store, url, target)
    return {name: file.read_bytes() for name, file in files_below(target).items()}


def test_what_did_not_change_is_not_sent_again(place: Place, faults: FaultProxy, tmp_path: Path):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    files = made(tmp_path / "a", one=os.urandom(300_000), two=b"2")
    put_folder(store, files, url, keeps_versions=True)
    assert faults.bytes_up > 300_000
    names, sent = place.names(), faults.bytes_up
    put_folder(store, files, url, keeps_versions=True)
    assert place.names() == names
    assert faults.bytes_up - sent < 5_000


def test_a_folder_that_keeps_no_versions_sends_only_what_is_new_and_removes_what_is_gone(
    place: Place, faults: FaultProxy, tmp_path: Path
):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    kept = os.urandom(300_000)
    put_folder(store, made(tmp_path / "a", kept=kept, gone=b"1"), url, keeps_versions=False)
    sent = faults.bytes_up
    put_folder(store, made(tmp_path / "b", kept=kept, new=b"2"), url, keeps_versions=False)
    assert faults.bytes_up - sent < 10_000
    assert read(store, url, tmp_path / "read") == {"kept": kept, "new": b"2"}
    assert {name.rpartition("/")[2] for name in place.names()} == {"kept", "new", MANIFEST}


@pytest.mark.parametrize("keeps_versions", [True, False])
def test_written_again_a_folder_has_each_object_that_was_lost_or_cut_and_nothing_else_is_sent(
    place: Place, faults: FaultProxy, tmp_path: Path, keeps_versions: bool
):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    texts = {"kept": os.urandom(300_000), "one": b"same", "two": b"same", "cut": b"123"}
    files = made(tmp_path / "a", **texts)
    manifest = put_folder(store, files, url, keeps_versions=keeps_versions)
    place.remove(f"folder/{manifest.files['two'].key}")
    place.put(f"folder/{manifest.files['cut'].key}", b"12")
    sent = faults.bytes_up
    assert put_folder(store, files, url, keeps_versions=keeps_versions).version == manifest.version
    assert read(store, url, tmp_path / "read") == texts
    assert faults.bytes_up - sent < 20_000


def test_a_new_version_sends_what_it_shares_with_the_one_before_if_that_was_lost(place: Place, tmp_path: Path):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    manifest = put_folder(store, made(tmp_path / "a", kept=b"1", gone=b"2"), url, keeps_versions=False)
    place.remove(f"folder/{manifest.files['kept'].key}")
    put_folder(store, made(tmp_path / "b", kept=b"1", new=b"3"), url, keeps_versions=False)
    assert read(store, url, tmp_path / "read") == {"kept": b"1", "new": b"3"}


def test_an_upload_that_is_cut_off_leaves_the_folder_before_and_goes_on_later(
    place: Place, faults: FaultProxy, tmp_path: Path
):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    put_folder(store, made(tmp_path / "a", file=b"earlier"), url, keeps_versions=True)
    files = made(tmp_path / "b", file=os.urandom(BIG))
    faults.cut_up_at = 2_000_000
    with pytest.raises(ValueError, match="could not be reached"):
        put_folder(store, files, url, keeps_versions=True)
    faults.heal()
    assert read(store, url, tmp_path / "read") == {"file": b"earlier"}
    put_folder(store, files, url, keeps_versions=True)
    assert read(store, url, tmp_path / "read") == {"file": files["file"].read_bytes()}


def test_bytes_altered_on_the_way_up_are_never_kept(place: Place, faults: FaultProxy, tmp_path: Path):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    files = made(tmp_path / "a", file=os.urandom(BIG))
    faults.flip_up_at, faults.times = 2_000_000, 1
    put_folder(store, files, url, keeps_versions=True)  # the server refuses the part, and it is sent again
    assert faults.times == 0
    assert read(store, url, tmp_path / "read") == {"file": files["file"].read_bytes()}


def test_bytes_altered_on_the_way_down_are_fetched_again(place: Place, faults: FaultProxy, tmp_path: Path):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    files = made(tmp_path / "a", file=os.urandom(3_000_000))
    put_folder(store, files, url, keeps_versions=True)
    faults.flip_down_at, faults.times = 1_000_000, 1
    assert read(store, url, tmp_path / "read") == {"file": files["file"].read_bytes()}
    assert faults.times == 0


def test_other_bytes_under_the_name_are_refused_and_the_target_stays(place: Place, tmp_path: Path):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    manifest = put_folder(store, made(tmp_path / "a", file=b"right"), url, keeps_versions=True)
    made(tmp_path / "read", file=b"earlier")
    place.put(f"folder/{manifest.files['file'].key}", b"wrong")
    with pytest.raises(ValueError, match="other bytes"):
        get_folder(store, url, tmp_path / "read")
    assert (tmp_path / "read" / "file").read_bytes() == b"earlier"


def test_an_object_that_is_removed_in_the_middle_is_one_line_and_the_target_stays(place: Place, tmp_path: Path):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    manifest = put_folder(store, made(tmp_path / "a", one=b"1", two=b"2"), url, keeps_versions=True)
    place.remove(f"folder/{manifest.files['two'].key}")
    with pytest.raises(ValueError, match="two was removed") as caught:
        get_folder(store, url, tmp_path / "read")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "read").exists()


def test_of_two_writers_at_once_one_is_told_and_a_reader_never_has_a_mix(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    first, second = made(tmp_path / "a", one=b"1", two=b"2"), made(tmp_path / "b", one=b"3", two=b"4")
    write = folders._write_manifest

    def write_after_the_other(*given: Any) -> None:
        monkeypatch.setattr(folders, "_write_manifest", write)
        put_folder(store, second, url, keeps_versions=False)
        write(*given)

    monkeypatch.setattr(folders, "_write_manifest", write_after_the_other)
    with pytest.raises(Changed, match="another run"):
        put_folder(store, first, url, keeps_versions=False)
    assert read(store, url, tmp_path / "read") == {"one": b"3", "two": b"4"}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (answering("400 Bad Request", "ExpiredToken"), "expired"),
        (answering("400 Bad Request", "400"), "expired"),
        (answering("404 Not Found", "NoSuchBucket"), "no such bucket"),
        (answering("503 Slow Down", "SlowDown"), "SlowDown"),
    ],
)
def test_what_a_server_refuses_is_one_line(place: Place, faults: FaultProxy, tmp_path: Path, answer: bytes, says: str):
    faults.answer = answer
    with pytest.raises(ValueError, match=says) as caught:
        get_folder(connect(SETTINGS), parse_url(place.url("folder")), tmp_path / "read")
    assert "\n" not in str(caught.value)


def test_a_sign_of_urls_in_a_files_name_does_not_break_the_folder(place: Place, tmp_path: Path):
    """The manifest of the first upload is read by the second."""
    store, url = connect(SETTINGS), parse_url(place.url("folder"))
    for text in (b"1", b"2"):
        put_folder(store, made(tmp_path / "a", **{"cache #2.jsonl": text}), url, keeps_versions=True)
    assert read(store, url, tmp_path / "read") == {"cache #2.jsonl": b"2"}


@pytest.mark.parametrize("name", ["", "/etc/passwd", "a//b", "a/", "./a", "a/../../b", "a\0b"])
def test_a_name_that_leaves_the_folder_or_no_file_can_have_is_refused(name: str):
    with pytest.raises(ValueError, match="no file name may be"):
        folders.check_name(name, parse_url("s3://bucket/folder"))


def test_a_manifest_of_somebody_else_is_refused(place: Place, tmp_path: Path):
    file = f'{{"files": {{"../x": {{"key": "k", "size": 1, "sha256": "{"0" * 64}"}}}}, "version": "v"}}'
    place.put(f"folder/{MANIFEST}", file.encode())
    with pytest.raises(ValueError, match="no manifest of turnwise"):
        get_folder(connect(SETTINGS), parse_url(place.url("folder")), tmp_path / "read")
