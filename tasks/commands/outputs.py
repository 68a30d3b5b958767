"""Files and folders that a command writes where a person says: it replaces what it wrote before, and nothing else."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

MAX_READ = 1 << 26  # bytes of a file that say what it is


def refuse_to_replace(
    out: Path,
    *,
    kind: str,
    is_own: Callable[[Path], bool],
    remedy: str,
    is_folder: bool = False,
    reads: Iterable[Path] = (),
) -> None:
    """ValueError where `out` is there and `is_own` does not know it as `kind`, or where it is or contains a file that
    the command reads. An empty file may be replaced, by a file and not by a folder. A new folder has no name of a file,
    such as b7.csv.
    """
    if not out.exists():
        if is_folder and out.suffix[1:].isalpha():
            raise ValueError(f"{out}: is the name of a {out.suffix} file, and a folder would be made there. {remedy}")
        return
    place = out.resolve()
    read = next((file for file in reads if file.resolve().is_relative_to(place)), None)
    if read is not None:
        raise ValueError(f"{out}: to write there would remove {read}, which the command reads. {remedy}")
    is_free = not is_folder and out.is_file() and not out.stat().st_size
    if not is_free and not is_own(out):
        raise ValueError(f"{out}: exists and is not {kind}, so it is not replaced. {remedy}")


def first_json(file: Path) -> Any:
    """The JSON value that a file begins with: its first line, or all of it; None where there is none."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return _read_value(stream)


def json_in_tar(file: Path, name: str) -> Any:
    """The JSON value of a file in a tar; None where there is none."""
    if not file.is_file():
        return None
    try:
        with tarfile.open(file, "r:") as archive:
            stream = archive.extractfile(name)
            return _read_value(stream) if stream else None
    except (KeyError, tarfile.TarError):
        return None


def _read_value(stream: IO[bytes]) -> Any:
    text = stream.read(MAX_READ).decode("utf-8", errors="ignore")
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError):
        return None
