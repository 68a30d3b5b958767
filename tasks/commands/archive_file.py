"""The file of a backup: a tar with the SHA-256 of every file in its manifest, compared whenever it is read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.commands.outputs import json_in_tar

MANIFEST, FORMAT = "manifest.json", 1
MLFLOW, PREFECT, FILES = "mlflow.db", "prefect.db", "files"  # names in the archive
CHUNK = 1 << 20


def is_backup(file: Path) -> bool:
    manifest = json_in_tar(file, MANIFEST)
    return isinstance(manifest, dict) and {"format", "sha256"} <= manifest.keys()


def add_file(archive: tarfile.TarFile, name: str, path: Path) -> str:
    """The file as it is now: what is appended while it is read is left out."""
    with path.open("rb") as stream:
        entry = tarfile.TarInfo(name)
        status = os.fstat(stream.fileno())
        entry.size, entry.mode = status.st_size, status.st_mode & 0o777
        hashed = _Hashed(stream)
        archive.addfile(entry, hashed)
    return hashed.digest()


class _Hashed:
    """A stream that hashes what is read of it."""

    def __init__(self, stream: Any):
        self.stream, self.hash = stream, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.stream.read(size)
        self.hash.update(data)
        return data

    def digest(self) -> str:
        return self.hash.hexdigest()


def add_manifest(archive: tarfile.TarFile, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, sort_keys=True).encode()
    entry = tarfile.TarInfo(MANIFEST)
    entry.size = len(text)
    archive.addfile(entry, io.BytesIO(text))


def read_all(archive: tarfile.TarFile, file: Path, target: Path | None = None) -> dict[str, Any]:
    """Compare every file with its hash, and write it under `target`; the manifest. ValueError for any difference."""
    found, manifest = {}, None
    for entry in archive:
        stream = archive.extractfile(entry)
        if stream is None or PurePosixPath(entry.name).is_absolute() or ".." in PurePosixPath(entry.name).parts:
            raise not_a_backup(file, f"{entry.name!r} is no plain file")
        if entry.name == MANIFEST:
            manifest = json.load(stream)
            continue
        hashed = _Hashed(stream)
        _drain(hashed, entry, target)
        found[entry.name] = hashed.digest()
    if manifest is None or manifest.get("format") != FORMAT or MLFLOW not in found:
        raise not_a_backup(file, "it has no manifest of this version")
    if found != manifest["sha256"]:
        raise not_a_backup(file, "a file in it is not the one that was stored")
    return dict(manifest)


def _drain(hashed: _Hashed, entry: tarfile.TarInfo, target: Path | None) -> None:
    if target is None:
        while hashed.read(CHUNK):
            pass
        return
    path = target / entry.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        while data := hashed.read(CHUNK):
            out.write(data)
    path.chmod(entry.mode | 0o400)


def extract(file: Path, target: Path) -> dict[str, Any]:
    try:
        with tarfile.open(file) as archive:
            return read_all(archive, file, target)
    except (tarfile.TarError, EOFError, json.JSONDecodeError) as error:
        raise not_a_backup(file, str(error)) from None


def not_a_backup(file: Path, fault: str) -> ValueError:
    return ValueError(
        f"{file} is no sound backup ({fault}), so nothing was changed. Take another, or copy the file again from where "
        f"it is kept."
    )
