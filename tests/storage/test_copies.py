"""Copies of what `s3://` URLs name, against a real S3 server that checks signatures."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from s3transfer.exceptions import S3DownloadFailedError

from tasks.core.files import read_json
from tasks.core.urls import COPIES, S3Url, local_path, parse_url
from tasks.storage import copies
from tasks.storage.client import StorageError, Store, connect
from tasks.storage.copies import local_copy, record_file
from tasks.storage.folders import MANIFEST, files_below, put_folder
from tasks.storage.inputs import PROBE
from tasks.storage.objects import Object
from tests.conftest import ROOT
from tests.services.servers import ObjectStore, wait_until
from tests.storage.fault_proxy import FaultProxy
from tests.storage.places import SETTINGS, Place

pytestmark = pytest.mark.slow
BIG = 3_000_000  # bytes


def test_a_file_is_downloaded_once_and_again_when_the_object_changed(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.put("problems.jsonl", b"one\n")
    copy = local_copy(place.url("problems.jsonl"), SETTINGS)
    assert copy == local_path(place.url("problems.jsonl"))
    assert copy.read_bytes() == b"one\n"
    first = copy.stat().st_ino

    local_copy(place.url("problems.jsonl"), SETTINGS)
    assert copy.stat().st_ino == first

    place.put("problems.jsonl", b"two\n")
    assert local_copy(place.url("problems.jsonl"), SETTINGS).read_bytes() == b"two\n"


def test_a_copy_that_is_current_needs_no_lock_and_one_of_before_is_not_downloaded_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    place.put("model/weights.bin", b"123")
    copy = local_copy(place.url("model"), SETTINGS)
    first = copy.stat().st_ino
    monkeypatch.setattr("tasks.storage.copies.only_writer", lambda file: pytest.fail("a lock is taken"))
    os.replace(record_file(copy), copy.parent / "record.json")
    assert local_copy(place.url("model"), SETTINGS).stat().st_ino == first
    assert [item.name for item in copy.parent.iterdir()] == [copy.name]


def test_a_folder_is_listed_once_and_again_after_its_download(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.put("model/weights.bin", b"123")
    listed: list[str] = []
    list_objects = copies.list_objects

    def note(store: Store, url: S3Url) -> list[Object]:
        listed.append(str(url))
        return list_objects(store, url)

    monkeypatch.setattr(copies, "list_objects", note)
    local_copy(place.url("model"), SETTINGS)
    local_copy(place.url("model"), SETTINGS)
    assert listed == [place.url("model")] * 3  # the last for the copy that was current


def test_a_copy_that_another_made_newer_while_this_one_waited_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch):
    place.put("model/weights.bin", b"one")
    downloads, download, only_writer = list[str](), copies._download, copies.only_writer

    @contextmanager
    def let_another_go_first(target: Path) -> Iterator[None]:
        monkeypatch.setattr(copies, "only_writer", only_writer)
        place.put("model/weights.bin", b"two!")
        local_copy(place.url("model"), SETTINGS)
        with only_writer(target):
            yield

    def note(store: Store, url: S3Url, *rest: Any) -> None:
        downloads.append(str(url))
        download(store, url, *rest)

    monkeypatch.setattr(copies, "only_writer", let_another_go_first)
    monkeypatch.setattr(copies, "_download", note)
    assert (local_copy(place.url("model"), SETTINGS) / "weights.bin").read_bytes() == b"two!"
    assert len(downloads) == 1


def test_a_copy_that_was_edited_here_is_fetched_again(place: Place):
    place.put("problems.jsonl", b"one\n")
    copy = local_copy(place.url("problems.jsonl"), SETTINGS)
    copy.write_bytes(b"edited\n")
    assert local_copy(place.url("problems.jsonl"), SETTINGS).read_bytes() == b"one\n"


def test_a_folder_of_another_program_is_copied_file_by_file_and_without_what_was_removed(place: Place):
    place.put("model/config.json", b"{}")
    place.put("model/sub/weights.bin", b"123")
    copy = local_copy(place.url("model"), SETTINGS)
    assert {str(file.relative_to(copy)) for file in copy.rglob("*") if file.is_file()} == {
        "config.json",
        "sub/weights.bin",
    }
    place.remove("model/sub/weights.bin")
    assert not (local_copy(place.url("model"), SETTINGS) / "sub" / "weights.bin").exists()


@pytest.mark.parametrize("name", ["cache #2 %41 é.json", "n" * 255])
def test_a_name_that_is_no_url_or_long_is_a_file_name_all_the_same(place: Place, name: str):
    place.put(f"odd/{name}", b"{}")
    assert [file.name for file in local_copy(place.url("odd"), SETTINGS).iterdir()] == [name]


@pytest.mark.parametrize("name", [MANIFEST, PROBE, "record.json"])
def test_an_object_may_be_named_like_a_file_that_turnwise_writes(place: Place, name: str):
    place.put(f"data/{name}", b"1")
    for _ in range(2):
        assert local_copy(place.url(f"data/{name}"), SETTINGS).read_bytes() == b"1"
    place.put(f"folder/{name}/{name}/file", b"2")
    for _ in range(2):
        assert (local_copy(place.url(f"folder/{name}"), SETTINGS) / name / "file").read_bytes() == b"2"


def test_an_object_that_is_a_folder_too_is_one_line(place: Place, monkeypatch: pytest.MonkeyPatch):
    """SeaweedFS keeps files and has no such pair; S3 has."""
    found = [Object(parse_url(place.url(f"both/{name}")), 1, "etag", None) for name in ("a", "a-c", "a/b")]
    monkeypatch.setattr("tasks.storage.copies.find_objects", lambda store, url: found)
    with pytest.raises(StorageError, match=r"both/a: is an object, and so is .*both/a/b below it"):
        local_copy(place.url("both"), SETTINGS)


def test_a_name_that_no_file_here_can_have_is_one_line(place: Place):
    """A name has 255 bytes at most, of which a folder's unfinished copy needs some; S3 takes 1,024."""
    place.put(f"{'n' * 250}/file", b"1")
    with pytest.raises(StorageError, match="File name too long") as caught:
        local_copy(place.url("n" * 250), SETTINGS)
    assert "\n" not in str(caught.value)


def test_an_object_that_is_replaced_while_its_parts_are_read_is_told_and_may_be_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    def replaced(*given: object) -> None:
        raise S3DownloadFailedError("Contents of stored object did not match expected ETag.")

    place.put("problems.jsonl", b"one\n")
    monkeypatch.setattr("s3transfer.futures.TransferFuture.result", replaced)
    with pytest.raises(StorageError, match="changed while it was downloaded") as caught:
        local_copy(place.url("problems.jsonl"), SETTINGS)
    assert caught.value.is_passing


def test_a_copy_whose_record_was_cut_is_fetched_again(place: Place):
    place.put("problems.jsonl", b"one\n")
    copy = local_copy(place.url("problems.jsonl"), SETTINGS)
    record_file(copy).write_text('{"obj', encoding="utf-8")
    assert local_copy(place.url("problems.jsonl"), SETTINGS).read_bytes() == b"one\n"
    assert read_json(record_file(copy))["objects"]


def test_of_two_processes_one_downloads_and_the_other_waits_for_it(place: Place, faults: FaultProxy):
    place.put("model/weights.bin", bytes(BIG))
    with ThreadPoolExecutor() as pool:
        copies = list(pool.map(local_copy, 3 * [place.url("model")], 3 * [SETTINGS]))
    assert [(copy / "weights.bin").stat().st_size for copy in copies] == 3 * [BIG]
    assert BIG < faults.bytes_down < 1.5 * BIG


@pytest.mark.parametrize("name", ["model", "model/weights.bin"])
def test_what_a_killed_download_left_goes_with_the_next(place: Place, faults: FaultProxy, name: str):
    place.put("model/weights.bin", bytes(BIG))
    faults.delay_seconds = 0.1
    code = "import sys, tests.storage.places as p, tasks.storage.copies as c; c.local_copy(sys.argv[1], p.SETTINGS)"
    command = [sys.executable, "-c", code, place.url(name)]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: any(COPIES.rglob("*.partial")), "a download")
    child.kill()
    child.wait()
    faults.heal()
    local_copy(place.url(name), SETTINGS)
    assert [item.name for item in COPIES.rglob("*") if item.is_file() and item.suffix != ".json"] == ["weights.bin"]


def test_a_folder_of_ours_is_copied_by_its_manifest(place: Place, tmp_path: Path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "a.txt").write_text("a")
    url = parse_url(place.url("folder"))
    put_folder(connect(SETTINGS), files_below(tmp_path / "made"), url, keeps_versions=True)
    place.put("folder/stranger.txt", b"no part of it")
    assert [file.name for file in local_copy(str(url), SETTINGS).rglob("*")] == ["a.txt"]


def test_a_url_with_a_hash_takes_that_content_and_no_other_and_needs_no_server_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    place.put("cache.jsonl", b"frozen\n")
    right = f"{place.url('cache.jsonl')}#sha256={hashlib.sha256(b'frozen' + bytes([10])).hexdigest()}"
    wrong = f"{place.url('cache.jsonl')}#sha256={hashlib.sha256(b'other').hexdigest()}"
    with pytest.raises(ValueError, match="other bytes"):
        local_copy(wrong, SETTINGS)
    assert local_copy(right, SETTINGS).read_bytes() == b"frozen\n"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert local_copy(right, SETTINGS).read_bytes() == b"frozen\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret-0123456789"}, "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": "nobody0123456789"}, "AWS_ACCESS_KEY_ID"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"}, "could not be reached"),
        ({"AWS_ACCESS_KEY_ID": ""}, "no credentials"),
        ({"AWS_SESSION_TOKEN": "x" * 40}, "token"),
    ],
)
def test_what_is_wrong_with_the_access_is_one_line_without_the_secret(
    place: Place, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], says: str
):
    for name, value in change.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    if not change.get("AWS_ACCESS_KEY_ID", "x"):
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(ValueError) as caught:
        local_copy(place.url("anything.jsonl"), SETTINGS)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message
    assert not [value for value in (os.environ.get("AWS_SECRET_ACCESS_KEY"), "x" * 40) if value and value in message]


def test_a_bucket_that_is_not_there_or_a_strangers_is_told_by_its_name(place: Place, object_store: ObjectStore):
    for bucket, says in (("no-such-bucket", "no such bucket"), (object_store.strangers_bucket, "not ours")):
        with pytest.raises(ValueError, match=says) as caught:
            local_copy(f"s3://{bucket}/problems.jsonl", SETTINGS)
        assert f"s3://{bucket}" in str(caught.value)
