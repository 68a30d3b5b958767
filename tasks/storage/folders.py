"""A folder on S3 that is whole or not there: its files, then its manifest, by which alone it is read.

    s3://bucket/prefix/results/train/turnwise.manifest.json   what it contains now, with the hash of each file
    s3://bucket/prefix/results/train/3f2a9c01d4e5b678/…        the files of one version, under their own names

A reader takes the files that the manifest names and compares their hashes: it has the whole folder or the one before.
A version is named by its content, so two writers of the same bytes write the same objects, and of different bytes other
ones; the manifest is replaced only if it is still the one that was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from pydantic import Field

from tasks.core.files import atomic_folder, file_hash, files_of, json_hash
from tasks.core.records import Record
from tasks.core.urls import S3Url
from tasks.storage.client import Absent, Changed, StorageError, Store
from tasks.storage.objects import copy_there, download, is_uploaded, list_objects, remove, upload

MANIFEST = "turnwise.manifest.json"
MAX_MANIFEST_BYTES = 64_000_000


class StoredFile(Record):
    """`key` is below the folder's URL."""

    key: str
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(Record):
    """`files` by their path in the folder."""

    files: dict[str, StoredFile]
    version: str


class Read(Record):
    """A manifest, when it was written, and the ETag it had, by which its next writer knows that nobody else wrote."""

    manifest: Manifest
    modified: datetime
    etag: str


def put_folder(
    store: Store,
    files: Mapping[str, Path],
    url: S3Url,
    *,
    keeps_versions: bool,
    elsewhere: Mapping[str, S3Url] | None = None,
) -> Manifest:
    """Make the folder at `url` these files, by their path in it; only what is missing there is sent.

    With `keeps_versions` each version has all of its files in a folder of its own, which people can open. Without, a
    file that the manifest names is not sent again, and what the new one does not name is removed. `elsewhere`: objects
    by their SHA-256, which the server copies by itself. Changed is raised where another writer came first.
    """
    before = find_manifest(store, url)
    hashes = {name: file_hash(file) for name, file in sorted(files.items())}
    version = json_hash(hashes)[:16]
    there = [] if before is None else _files_there(store, url, before.manifest, keeps_versions)
    if before is not None and before.manifest.version == version and len(there) == len(files):
        return before.manifest
    known = {} if keeps_versions else {file.sha256: file for file in there}
    stored = {}
    for name, sha256 in hashes.items():
        new = StoredFile(key=f"{version}/{name}", size=files[name].stat().st_size, sha256=sha256)
        stored[name] = known.get(sha256) or _put(store, files[name], url, new, (elsewhere or {}).get(sha256))
    manifest = Manifest(files=stored, version=version)
    if before is None or manifest != before.manifest:
        _write_manifest(store, url, manifest, before)
        if keeps_versions:  # a prune that began before may have removed what was there and was not sent
            there = _files_there(store, url, manifest, keeps_versions)
            for name in sorted(name for name, file in stored.items() if file not in there):
                _put(store, files[name], url, stored[name], None)
    if before is not None and not keeps_versions:
        _remove_unnamed(store, url, before.manifest, manifest)
    return manifest


def _files_there(store: Store, url: S3Url, manifest: Manifest, keeps_versions: bool) -> list[StoredFile]:
    """What the manifest names and S3 has not lost."""
    listed = list_objects(store, url / manifest.version if keeps_versions else url)
    sizes = {item.url: item.size for item in listed}
    return [file for file in manifest.files.values() if sizes.get(url / file.key) == file.size]


def _put(store: Store, file: Path, url: S3Url, new: StoredFile, same: S3Url | None) -> StoredFile:
    place = url / new.key
    if is_uploaded(store, place, size=new.size, sha256=new.sha256):
        return new
    if same is None or not copy_there(store, same, place, size=new.size, sha256=new.sha256):
        upload(store, file, place)
    return new


def _write_manifest(store: Store, url: S3Url, manifest: Manifest, before: Read | None) -> None:
    place = url / MANIFEST
    condition = {"IfNoneMatch": "*"} if before is None else {"IfMatch": before.etag}
    body = json.dumps(manifest.model_dump(), indent=2, sort_keys=True).encode()
    try:
        with store.clear_errors(place):
            store.client.put_object(
                Bucket=place.bucket, Key=place.key, Body=body, ContentType="application/json", **condition
            )
    except Changed:  # also where the answer to our own write was lost, and boto3 sent it again
        now = find_manifest(store, url)
        if now is None or now.manifest != manifest:
            raise


def _remove_unnamed(store: Store, url: S3Url, before: Manifest, now: Manifest) -> None:
    for key in sorted({file.key for file in before.files.values()} - {file.key for file in now.files.values()}):
        remove(store, url / key)


def find_manifest(store: Store, url: S3Url) -> Read | None:
    """None where there is no such folder of ours; ValueError for a manifest that turnwise did not write."""
    place = url / MANIFEST
    try:
        with store.clear_errors(place):
            found = store.client.get_object(Bucket=place.bucket, Key=place.key)
            body = found["Body"].read(MAX_MANIFEST_BYTES)
    except Absent:
        return None
    try:
        manifest = Manifest.model_validate_json(body)
        for name, file in manifest.files.items():
            check_name(name, url)
            check_name(file.key, url)
    except ValueError:
        raise StorageError(
            f"{place}: is no manifest of turnwise, so the folder cannot be read. Write it again."
        ) from None
    return Read(manifest=manifest, modified=found["LastModified"], etag=str(found["ETag"]))


def check_name(name: str, folder: S3Url) -> None:
    """ValueError for a path that could leave the folder it is below, and for one that no file can have."""
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(
            f"{folder}: {name!r} in it has an empty part, `.`, `..` or a NUL, which no file name may be. Name the "
            f"object otherwise."
        )


def get_folder(store: Store, url: S3Url, target: Path) -> None:
    """Make `target` the folder at `url`; it is replaced when every file is there and right."""
    found = find_manifest(store, url)
    if found is None:
        raise Absent(f"{url}: is no folder that turnwise wrote, so there is nothing to read. Correct the URL.")
    with atomic_folder(target) as temporary:
        fetch_files(store, url, found.manifest.files, temporary)


def fetch_files(store: Store, url: S3Url, files: Mapping[str, StoredFile], target: Path) -> None:
    for name, file in files.items():
        try:
            download(store, url / file.key, target / name, sha256=file.sha256)
        except Absent:
            raise StorageError(
                f"{url}: {name} was removed while the folder was read, so nothing of it is used. Run again; if it "
                f"stays so, the folder is incomplete: write it again.",
                is_passing=True,
            ) from None


def files_below(folder: Path) -> dict[str, Path]:
    """The files of a folder by their path in it."""
    return {file.relative_to(folder).as_posix(): file for file in files_of(folder)}


def remove_folder(store: Store, url: S3Url) -> None:
    """The manifest first: what is no longer whole is no longer read."""
    found = find_manifest(store, url)
    if found is not None:
        remove(store, url / MANIFEST)
        for file in found.manifest.files.values():
            remove(store, url / file.key)
