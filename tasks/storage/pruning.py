"""What `paths.remote` and DVC's remote have and nothing needs: older versions of results, checkpoints of trainings that
ended long ago, weights of older runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from tasks.core.urls import S3Url
from tasks.storage.client import Absent, StorageError, Store, refusal
from tasks.storage.folders import MANIFEST, find_manifest
from tasks.storage.mirror import RESULTS, RESUME
from tasks.storage.objects import look_up

MAX_KEYS = 1000  # of one request


class OldObjects(NamedTuple):
    """Everything under `url`, or some objects of it."""

    url: S3Url
    keys: list[str]
    size: int


class _Listed(NamedTuple):
    modified: datetime
    keys: list[str]
    size: int


def old_results(store: Store, remote: S3Url, *, keep: int) -> Iterator[OldObjects]:
    """Versions of each folder of results beyond the newest `keep`; never the one that its manifest names, nor one that
    got an object after the manifest: another machine may be uploading it.
    """
    for name, folder in _folders(store, remote / RESULTS).items():
        found = find_manifest(store, remote / RESULTS / name)
        if found is None:
            continue  # the first upload has not ended
        versions = sorted(folder.items(), key=lambda item: item[1].modified, reverse=True)
        older = [item for item in versions if item[1].modified < found.modified and item[0] != found.manifest.version]
        for version, listed in older[keep - 1 :]:
            yield OldObjects(remote / RESULTS / name / version, listed.keys, listed.size)


def remove_results(store: Store, old: OldObjects) -> None:
    """Unless the manifest names this version by now: another machine has its content again, and had nothing to send."""
    folder, _, version = old.url.key.rpartition("/")
    found = find_manifest(store, S3Url(old.url.bucket, folder, None))
    if found is None or found.manifest.version != version:
        remove_objects(store, old)


def old_checkpoints(store: Store, remote: S3Url, *, days: float) -> Iterator[OldObjects]:
    """Checkpoints that no training has added to for so many days: it ended on a machine that never came back."""
    limit = datetime.now(UTC) - timedelta(days=days)
    for stage, folder in _folders(store, remote / RESUME).items():
        for key, listed in folder.items():
            if listed.modified < limit:
                yield OldObjects(remote / RESUME / stage / key, listed.keys, listed.size)


def objects_of_dvc(store: Store, remote: S3Url, hashes: Iterable[str]) -> OldObjects:
    """Those of the files with these MD5s that DVC's remote has."""
    keys, size = [], 0
    for md5 in sorted(hashes):
        with suppress(Absent):
            found = look_up(store, remote / "files" / "md5" / md5[:2] / md5[2:])
            keys.append(found.url.key)
            size += found.size
    return OldObjects(remote, keys, size)


def remove_objects(store: Store, old: OldObjects) -> None:
    """A folder's manifest goes first, so that nobody begins to read what is going. StorageError where S3 keeps some."""
    keys = sorted(old.keys, key=lambda key: not key.endswith(f"/{MANIFEST}"))
    for start in range(0, len(keys), MAX_KEYS):
        batch = [{"Key": key} for key in keys[start : start + MAX_KEYS]]
        with store.clear_errors(old.url):
            answer = store.client.delete_objects(Bucket=old.url.bucket, Delete={"Objects": batch, "Quiet": True})
        if answer.get("Errors"):
            raise _stays(store, old.url.bucket, answer)


def _stays(store: Store, bucket: str, answer: Mapping[str, Any]) -> StorageError:
    """Of an answer whose status is 200 and whose body says what was refused."""
    first, *others = answer["Errors"]
    more = f" and {len(others)} more" if others else ""
    place = f"s3://{bucket}/{first['Key']}{more} could not be removed ({first['Code']})"
    return refusal(place, {**answer, "Error": first}, store.secrets.hide)


def _folders(store: Store, url: S3Url) -> dict[str, dict[str, _Listed]]:
    """The objects under `url` by the first two parts of their keys: `name/version/…`, `stage/key/…`."""
    found: dict[str, dict[str, _Listed]] = defaultdict(dict)
    prefix = f"{url.key}/"
    with store.clear_errors(url):
        for page in store.client.get_paginator("list_objects_v2").paginate(Bucket=url.bucket, Prefix=prefix):
            for item in page.get("Contents", []):
                parts = item["Key"].removeprefix(prefix).split("/")
                if len(parts) > 2:
                    name, version = parts[:2]
                    before = found[name].get(version, _Listed(item["LastModified"], [], 0))
                    before.keys.append(item["Key"])
                    newest = max(before.modified, item["LastModified"])
                    found[name][version] = before._replace(modified=newest, size=before.size + item["Size"])
    return found
