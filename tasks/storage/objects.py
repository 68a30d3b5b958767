"""One object up or down, by boto3's transfer manager (large files in parts), whole or not at all.

The SHA-256 of a file is in the object's metadata, and a download that does not have it is refused. An ETag says only
whether an object changed, never what is in it. On the way up the server checks the bytes against the checksum that
boto3 adds, and over plain HTTP against the signature too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.files import atomic_file, file_hash
from tasks.core.urls import S3Url
from tasks.storage.client import Absent, Altered, StorageError, Store

SHA256 = "sha256"  # in an object's metadata
DOWNLOADS = 2  # of an object whose bytes arrive altered


class Object(NamedTuple):
    """`etag` differs where the object was replaced; `sha256` is what its writer stated, if turnwise wrote it."""

    url: S3Url
    size: int
    etag: str
    sha256: str | None


def look_up(store: Store, url: S3Url) -> Object:
    with store.clear_errors(url):
        found = store.client.head_object(Bucket=url.bucket, Key=url.key)
    return Object(url, int(found["ContentLength"]), str(found["ETag"]), found["Metadata"].get(SHA256))


def list_objects(store: Store, url: S3Url) -> list[Object]:
    """Every object under `url/`, sorted by key; markers of empty folders are left out."""
    return sorted(_pages(store, url))


def _pages(store: Store, url: S3Url) -> Iterator[Object]:
    prefix = f"{url.key}/" if url.key else ""
    with store.clear_errors(url):
        for page in store.client.get_paginator("list_objects_v2").paginate(Bucket=url.bucket, Prefix=prefix):
            for item in page.get("Contents", []):
                if not item["Key"].endswith("/"):
                    place = S3Url(url.bucket, item["Key"], None)
                    yield Object(place, int(item["Size"]), str(item["ETag"]), None)


def upload(store: Store, file: Path, url: S3Url) -> str:
    """Its SHA-256. An upload that is cut off leaves the object as it was."""
    sha256 = file_hash(file)
    try:
        _send(store, file, url, sha256)
    except Altered:
        _send(store, file, url, sha256)
    found = look_up(store, url)
    if file_hash(file) != sha256:
        raise StorageError(f"{file}: changed while it was uploaded to {url}, so the copy is not used. Run again.")
    if (found.size, found.sha256) != (file.stat().st_size, sha256):
        raise StorageError(f"{url}: the server kept something else than was sent. Another writer was there: run again.")
    return sha256


def _send(store: Store, file: Path, url: S3Url, sha256: str) -> None:
    with store.clear_errors(url):
        store.client.upload_file(
            str(file), url.bucket, url.key, ExtraArgs={"Metadata": {SHA256: sha256}}, Config=store.transfer
        )


def is_uploaded(store: Store, url: S3Url, *, size: int, sha256: str) -> bool:
    try:
        found = look_up(store, url)
    except Absent:
        return False
    return (found.size, found.sha256) == (size, sha256)


def copy_there(store: Store, source: S3Url, url: S3Url, *, size: int, sha256: str) -> bool:
    """Let the server copy an object, so that nothing is sent twice; whether it is there now."""
    try:
        with store.clear_errors(url):
            place = {"Bucket": source.bucket, "Key": source.key}
            store.client.copy(place, url.bucket, url.key, Config=store.transfer)
    except StorageError:
        return False
    return is_uploaded(store, url, size=size, sha256=sha256)


def download(store: Store, url: S3Url, target: Path, *, sha256: str | None) -> str:
    """Its SHA-256, compared with `sha256` or with what its writer stated. `target` is replaced once that is right."""
    for _ in range(DOWNLOADS):
        expected = sha256 or look_up(store, url).sha256
        with suppress(Altered), atomic_file(target) as temporary:
            found = _fetch(store, url, temporary)
            if expected not in (None, found):
                raise Altered(url)
            return found
    raise Altered(url)


class _Hashed:
    """A file that is written from start to end, and hashed on the way: no second reading of gigabytes. Without `seek`,
    so the transfer manager writes its parts in order.
    """

    def __init__(self, stream: Any):
        self.stream, self.digest = stream, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return int(self.stream.write(data))


def _fetch(store: Store, url: S3Url, target: Path) -> str:
    with target.open("wb") as stream, store.clear_errors(url):
        hashed = _Hashed(stream)
        store.client.download_fileobj(url.bucket, url.key, hashed, Config=store.transfer)
    return hashed.digest.hexdigest()


def remove(store: Store, url: S3Url) -> None:
    with store.clear_errors(url):
        store.client.delete_object(Bucket=url.bucket, Key=url.key)
