"""A network that loses the answer to any one request: boto3 sends it again, and everything ends as without the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tasks.core.urls import S3Url, parse_url
from tasks.storage.client import Store, connect
from tasks.storage.copies import local_copy
from tasks.storage.folders import files_below, get_folder, put_folder, remove_folder
from tasks.storage.inputs import check_writable
from tasks.storage.objects import list_objects, upload
from tasks.storage.pruning import OldObjects, remove_objects
from tests.storage.fault_proxy import FaultProxy
from tests.storage.places import SETTINGS, Place
from tests.storage.test_folders import made

pytestmark = pytest.mark.slow
Operation = Callable[[Store, S3Url, Path], Any]


def write_folder(store: Store, url: S3Url, here: Path, *, keeps_versions: bool) -> Any:
    return put_folder(store, made(here / "new", kept=b"1", added=b"3"), url, keeps_versions=keeps_versions).files


def write_in_parts(store: Store, url: S3Url, here: Path) -> Any:
    made(here, big=bytes(9_000_000))
    return upload(store, here / "big", url / "big")


def read_folder(store: Store, url: S3Url, here: Path) -> Any:
    get_folder(store, url, here / "read")
    return [file.read_bytes() for file in files_below(here / "read").values()]


def copy_folder(store: Store, url: S3Url, here: Path) -> Any:
    return [file.read_bytes() for file in files_below(local_copy(str(url), SETTINGS)).values()]


def forget_folder(store: Store, url: S3Url, here: Path) -> Any:
    remove_folder(store, url)


def prune_folder(store: Store, url: S3Url, here: Path) -> Any:
    remove_objects(store, OldObjects(url, [item.url.key for item in list_objects(store, url)], 2))


def ask_whether_writable(store: Store, url: S3Url, here: Path) -> Any:
    check_writable(str(url), SETTINGS)


@pytest.mark.parametrize(
    "operation",
    [
        partial(write_folder, keeps_versions=True),
        partial(write_folder, keeps_versions=False),
        write_in_parts,
        read_folder,
        copy_folder,
        forget_folder,
        prune_folder,
        ask_whether_writable,
    ],
)
def test_every_operation_ends_as_without_the_loss(
    place: Place, faults: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Operation
):
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    store = connect(SETTINGS)

    def run(name: str, lost: int | None) -> Any:
        url, here = parse_url(place.url(f"{name}/folder")), tmp_path / name
        put_folder(store, made(here / "old", kept=b"1", gone=b"2"), url, keeps_versions=False)
        faults.heal()
        faults.lose_answer_to = lost
        told = operation(store, url, here)
        requests = faults.requests
        faults.heal()
        return requests, told, [item.removeprefix(f"{name}/") for item in place.names(name)]

    requests, *whole = run("whole", None)
    assert requests > 0
    for number in range(1, requests + 1):
        more, *ended = run(f"lost{number}", number)
        assert (more > requests, ended) == (True, whole)
