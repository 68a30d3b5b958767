"""What of S3 nothing needs: older versions of results, checkpoints that nobody added to, weights of older runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tasks.core.urls import parse_url
from tasks.storage import folders
from tasks.storage.client import StorageError, connect
from tasks.storage.folders import find_manifest, get_folder, put_folder
from tasks.storage.mirror import RESULTS, RESUME
from tasks.storage.pruning import (
    OldObjects,
    objects_of_dvc,
    old_checkpoints,
    old_results,
    remove_objects,
    remove_results,
)
from tests.storage.fault_proxy import FaultProxy, answer_of
from tests.storage.places import SETTINGS, Place
from tests.storage.test_folders import made

pytestmark = pytest.mark.slow


def test_the_version_of_the_manifest_and_the_newest_stay(place: Place, tmp_path: Path):
    store, remote = connect(SETTINGS), parse_url(place.url("agent"))
    url = remote / RESULTS / "train"
    versions = []
    for text in (b"one", b"two", b"three"):
        put_folder(store, made(tmp_path / text.decode(), weights=text), url, keeps_versions=True)
        found = find_manifest(store, url)
        assert found is not None
        versions.append(found.manifest.version)
        time.sleep(1.1)  # the server's times are in seconds
    assert [str(old.url).rpartition("/")[2] for old in old_results(store, remote, keep=2)] == versions[:1]
    assert list(old_results(store, remote, keep=3)) == []
    for old in old_results(store, remote, keep=1):
        assert old.size == 3
        remove_objects(store, old)
    get_folder(store, url, tmp_path / "read")
    assert (tmp_path / "read" / "weights").read_bytes() == b"three"
    assert sum(versions[0] in name or versions[1] in name for name in place.names()) == 0


def test_a_version_that_another_machine_is_uploading_stays(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first upload too, of which there is no manifest yet."""
    store, remote = connect(SETTINGS), parse_url(place.url("agent"))
    url = remote / RESULTS / "train"
    write = folders._write_manifest

    def prune_first(*given: Any) -> None:
        for old in old_results(store, remote, keep=1):
            remove_objects(store, old)
        write(*given)

    monkeypatch.setattr(folders, "_write_manifest", prune_first)
    for text in (b"one", b"two"):
        put_folder(store, made(tmp_path / text.decode(), weights=text), url, keeps_versions=True)
        get_folder(store, url, tmp_path / "read")
        assert (tmp_path / "read" / "weights").read_bytes() == text
        time.sleep(1.1)  # the server's times are in seconds
    put_folder(store, made(tmp_path / "three", weights=b"three"), url, keeps_versions=True)
    assert [old.size for old in old_results(store, remote, keep=1)] == [3]  # the first went before the third


def test_an_old_version_that_another_machine_makes_the_newest_again_stays_whole_also_where_it_sends_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once it is removed before the manifest names it, and once it is about to be removed when it does."""
    store, remote = connect(SETTINGS), parse_url(place.url("agent"))
    url, first = remote / RESULTS / "train", made(tmp_path / "one", weights=b"one")
    for files in (first, made(tmp_path / "two", weights=b"two")):
        put_folder(store, files, url, keeps_versions=True)
        time.sleep(1.1)  # the server's times are in seconds
    (old,) = old_results(store, remote, keep=1)
    write = folders._write_manifest

    def prune_first(*given: Any) -> None:
        remove_results(store, old)
        write(*given)

    monkeypatch.setattr(folders, "_write_manifest", prune_first)
    put_folder(store, first, url, keeps_versions=True)
    get_folder(store, url, tmp_path / "read")
    assert (tmp_path / "read" / "weights").read_bytes() == b"one"
    remove_results(store, old)
    get_folder(store, url, tmp_path / "read")


def test_checkpoints_go_once_nobody_added_to_them_for_long(place: Place, tmp_path: Path):
    store, remote = connect(SETTINGS), parse_url(place.url("agent"))
    put_folder(store, made(tmp_path / "a", state=b"12345"), remote / RESUME / "train" / "abc", keeps_versions=False)
    assert list(old_checkpoints(store, remote, days=1)) == []
    (old,) = old_checkpoints(store, remote, days=-1)
    assert str(old.url).endswith("resume/train/abc")
    remove_objects(store, old)
    assert place.names() == []


@pytest.mark.parametrize(("code", "says"), [("AccessDenied", "access is denied"), ("InternalError", "S3 answered 200")])
def test_what_s3_refuses_to_remove_is_one_line_with_number_key_and_code(
    place: Place, faults: FaultProxy, code: str, says: str
):
    """S3 answers 200 then, and says it in the body."""
    store, url = connect(SETTINGS), parse_url(place.url("agent"))
    errors = "".join(
        f"<Error><Key>k{number}</Key><Code>{code}</Code><Message>as the test asked</Message></Error>"
        for number in range(3)
    )
    body = f"<?xml version='1.0'?><DeleteResult>{errors}</DeleteResult>"
    faults.answer = answer_of("200 OK", body)
    with pytest.raises(StorageError, match=rf"/k0 and 2 more .*{code}.*{says}") as caught:
        remove_objects(store, OldObjects(url, ["k0", "k1", "k2", "gone"], 3))
    assert "\n" not in str(caught.value)


def test_of_dvcs_remote_only_the_named_objects_go(place: Place, tmp_path: Path):
    store, remote = connect(SETTINGS), parse_url(place.url("dvc"))
    old, other = "aa" + "1" * 30, "bb" + "2" * 30
    for md5 in (old, other):
        place.put(f"dvc/files/md5/{md5[:2]}/{md5[2:]}", b"1234")
    found = objects_of_dvc(store, remote, {old, "cc" + "3" * 30})
    assert (len(found.keys), found.size) == (1, 4)
    remove_objects(store, found)
    assert [name[-30:] for name in place.names()] == ["2" * 30]
