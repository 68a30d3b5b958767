"""Local copies of what `s3://` URLs name: downloaded once, checked at each use, replaced whole.

A check is one request (for a folder one per thousand objects): the copy is of these objects, by size and ETag, and its
files here were not touched. A URL that ends with #sha256=… names its content, so a copy of it needs no request.

    .cache/s3/3f2a9c01d4e5b678/model    the copy, under the last part of its URL
    .cache/s3/3f2a9c01d4e5b678.json     of which objects it is: no object's name leads there
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tasks.core.files import atomic_folder, file_hash, files_of, read_json, write_json
from tasks.core.targets import only_writer, remove_leftovers
from tasks.core.text import one_line
from tasks.core.urls import S3Url, is_url, local_path, parse_url
from tasks.storage.client import Absent, StorageError, Store, connect, replaced_meanwhile
from tasks.storage.folders import MANIFEST, check_name, get_folder
from tasks.storage.objects import Object, download, list_objects, look_up
from tasks.storage.settings import StorageSettings


def local_copy(text: str, settings: StorageSettings) -> Path:
    """The path of a file or folder: `text` itself, or the copy of an `s3://` URL, which is downloaded unless the copy
    here is of the same objects. ValueError, in one line, where that fails.
    """
    if not is_url(text):
        return Path(text)
    url, place = parse_url(text), local_path(text)
    if url.sha256 is not None and place.is_file() and file_hash(place) == url.sha256:
        return place
    store = connect(settings)
    with _clear_errors_here(url):
        _take_over_record(place)
        objects, before = find_objects(store, url), _recorded(place)
        if before == _record(objects, place):
            return place
    with _clear_errors_here(url), only_writer(place):
        if _recorded(place) != before:  # another made it while this one waited, maybe of newer objects
            objects = find_objects(store, url)
        if _recorded(place) != _record(objects, place):
            place.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(place.parent)
            record_file(place).unlink(missing_ok=True)
            _download(store, url, objects, place)
            write_json(record_file(place), _record(objects, place))
    return place


def record_file(place: Path) -> Path:
    return place.parent.with_suffix(".json")


def _take_over_record(place: Path) -> None:
    """A copy of before 2026-11-29 has it beside its files. Or else it is an object of that name."""
    earlier = place.parent / "record.json"
    if earlier != place and earlier.is_file() and not record_file(place).exists():
        os.replace(earlier, record_file(place))


def find_objects(store: Store, url: S3Url) -> list[Object]:
    """The object itself, or those in a folder; ValueError where there is neither."""
    try:
        if url.key:
            return [look_up(store, url)]
    except StorageError as error:
        if error.is_passing:
            raise
    objects = list_objects(store, url)  # unlike the answer to a HEAD, its refusal says why
    if not objects or url.sha256 is not None:
        raise Absent(f"{url}: there is no such object or folder, so there is nothing to read. Correct the URL.")
    return objects


def _download(store: Store, url: S3Url, objects: list[Object], place: Path) -> None:
    if [item.url.key for item in objects] == [url.key]:
        download(store, url, place, sha256=url.sha256)
    elif any(item.url == url / MANIFEST for item in objects):
        get_folder(store, url, place)
    else:
        _download_plain_folder(store, url, objects, place)
    if find_objects(store, url) != objects:
        raise replaced_meanwhile(url)


def _download_plain_folder(store: Store, url: S3Url, objects: list[Object], place: Path) -> None:
    """Of another program: without a manifest, so each object is taken as the list has it."""
    _refuse_file_that_is_a_folder(objects)
    with atomic_folder(place) as temporary:
        for item in objects:
            name = item.url.key.removeprefix(f"{url.key}/")
            check_name(name, url)
            download(store, item.url, temporary / name, sha256=None)


def _refuse_file_that_is_a_folder(objects: list[Object]) -> None:
    urls = {str(item.url) for item in objects}
    for url in sorted(urls):
        parents = (url[:end] for end, letter in enumerate(url) if letter == "/")
        if both := next((parent for parent in parents if parent in urls), None):
            raise StorageError(
                f"{both}: is an object, and so is {url} below it, which a folder of files cannot have. Remove one of "
                f"them, or name a folder without both."
            )


@contextmanager
def _clear_errors_here(url: S3Url) -> Iterator[None]:
    """Of the file system, which takes no name of 300 characters, say. ValueError with the file's name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise StorageError(
            f"{url}: a file of its copy cannot be written ({error.strerror}: "
            f"{one_line(error.filename, limit=200)}), so there is none. Give the object another name, or correct the "
            f"folder here."
        ) from None


def _recorded(place: Path) -> Any:
    """None also for a record that was cut: the copy is fetched again."""
    file = record_file(place)
    with suppress(ValueError):
        return read_json(file) if file.exists() and place.exists() else None
    return None


def _record(objects: list[Object], place: Path) -> dict[str, Any]:
    """Which objects, and the files here by size and time: one that was edited is no copy."""
    here = files_of(place) if place.exists() else []
    return {
        "objects": [[str(item.url), item.size, item.etag] for item in objects],
        "files": [[str(file.relative_to(place.parent)), file.stat().st_size, file.stat().st_mtime_ns] for file in here],
    }
