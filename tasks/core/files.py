"""JSON, JSONL and YAML files, written atomically; content hashes; errors that name the file, the line and the remedy.

Files are written beside their target and renamed onto it, so a reader never sees half a file. Hashes depend on content
only and are equal on every machine.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tasks.core import json_text
from tasks.core.kept_files import check_shape, damaged, kept_file, row_check
from tasks.core.stages import STAGES
from tasks.core.targets import behind_links, put_back
from tasks.core.text import one_line

if TYPE_CHECKING:
    from pydantic import BaseModel

RecordT = TypeVar("RecordT", bound="BaseModel")
# A file changed more recently could change again with the same time: file systems have ticks of up to 2 s.
SETTLED_NANOSECONDS = 2_000_000_000
SHARED_SECONDS = 30.0  # in which a file that one machine wrote is seen by all: a network's folder may lag


class _Version(NamedTuple):
    size: int
    modified: int


class _Hash(NamedTuple):
    version: _Version
    digest: str


_hashes: dict[tuple[int, int], _Hash] = {}  # by device and inode: a file keeps its hash when it is renamed or linked


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it replaces `path`, on error it is removed. Where `path` is a
    link, what it leads to is replaced.
    """
    path = behind_links(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    name = os.fsencode(path.name)  # of 255 bytes at most
    short = path.name if len(name) < 200 else hashlib.sha256(name).hexdigest()[:16]
    temporary = path.with_name(f".{short}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """The same for a folder. It takes two renames; a call that is killed between them leaves the old folder hidden, and
    the next call puts it back.
    """
    path = behind_links(path)
    temporary, replaced = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("partial", "replaced"))
    put_back(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():
            os.replace(path, replaced)
        os.replace(temporary, path)
        if replaced.exists():
            os.replace(replaced, temporary)  # what is put back is whole: only a .partial is removed file by file
    finally:
        put_back(path)
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Sorted and indented, so equal values give equal files; NaN is refused."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """ValueError, with the remedy, if the file is not JSON or not of the shape in `kept_files.py`."""
    content = require(path).read_bytes()
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise damaged(path, f"not UTF-8 text ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise damaged(path, f"not JSON ({error.msg} at line {error.lineno}, column {error.colno})") from None
    except (RecursionError, ValueError):
        raise damaged(path, "JSON nested too deep, or a number too long to read") from None
    check_shape(path, value)
    return value


def read_yaml(path: Path) -> Any:
    import yaml

    from tasks.core.yaml_text import PLAIN

    content = require(path).read_bytes()
    try:
        value = PLAIN.load(content.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(path, f"not YAML ({one_line(error)})") from None
    check_shape(path, value)
    kept = kept_file(path)
    if kept is not None and kept.shape is not None and not content.endswith(b"\n"):
        # Programs end the last line. A truncated YAML file is often valid, with half a value.
        raise damaged(path, "cut off in the middle of a line")
    return value


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with atomic_file(path) as temporary, temporary.open("wb") as stream:
        for row in rows:
            stream.write(json_text.json_row(row) + b"\n")


def read_jsonl(
    path: Path, *, is_only_shown: bool = False, by_hand: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, row) of each non-empty line; ValueError names a line that is not a JSON object, with the
    remedy. Bytes that are not UTF-8 are an error too, or U+FFFD if rows are `is_only_shown` to people. In a file that
    people write `by_hand`, a byte order mark may begin it, and a key that an object has twice is an error.
    """
    check, encoding = row_check(path), "utf-8-sig" if by_hand else "utf-8"
    with require(path).open(encoding=encoding, errors="replace" if is_only_shown else "strict") as stream:
        try:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    row = _json_object(path, number, line, unique_names=by_hand)
                    check(row, number)
                    yield number, row
        except UnicodeDecodeError as error:
            found, number = f"not UTF-8 text ({error.reason})", _first_line_of_other_bytes(path)
            if kept_file(path):
                raise damaged(path, found, line=number) from None
            raise ValueError(f"{path}, line {number}: {found}. Save the file as UTF-8.") from None


def _first_line_of_other_bytes(path: Path) -> int:
    """A text is decoded in blocks, so the reader does not know the line."""
    with path.open("rb") as stream:
        return next(number for number, line in enumerate(stream, start=1) if not _is_utf8(line))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _json_object(path: Path, number: int, line: str, *, unique_names: bool = False) -> dict[str, Any]:
    try:
        row = json_text.parse(line.rstrip("\r\n"), max_depth=json_text.MAX_ROW_DEPTH, unique_names=unique_names)
    except json_text.RepeatedName as error:
        found = f"the key {error.name!r} is there twice, and only its last value would be read"
        raise damaged(path, found, line=number) from None
    except json.JSONDecodeError as error:
        raise damaged(path, f"not valid JSON ({error.msg} at column {error.colno})", line=number) from None
    except ValueError:
        found = (
            f"JSON nested deeper than {json_text.MAX_ROW_DEPTH} levels, or a number that no file can hold again (NaN, "
            f"Infinity, one too long)"
        )
        raise damaged(path, found, line=number) from None
    if not isinstance(row, dict):
        raise damaged(path, f"expected one JSON object, found {type(row).__name__}", line=number)
    return row


def read_records(path: Path, record: type[RecordT]) -> Iterator[RecordT]:
    from pydantic import ValidationError

    for number, row in read_jsonl(path):
        try:
            yield record.model_validate(row)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            raise damaged(path, f"not a {record.__name__} ({place}: {fault['msg']})", line=number) from None


def require(path: Path, *, made_by: str | None = None) -> Path:
    """`path` if it exists; else ValueError names the stage that makes it."""
    if not path.exists():
        maker = made_by or _stage_of(path)
        first = f"Run `dvc repro` first, which uses its cache, or `python -m tasks {maker}` alone."
        remedy = first if maker else "Check the path."
        raise ValueError(f"{path}: does not exist, and this step reads it. {remedy}")
    return path


def _stage_of(path: Path) -> str | None:
    return next((part for part in reversed(path.parts[:-1]) if part in STAGES), None)


def content_hash(*paths: Path, ignore: Callable[[Path], bool] = lambda path: False) -> str:
    """SHA-256 over relative names and bytes of files and folders, sorted; independent of their location."""
    digest = hashlib.sha256()
    for path in paths:
        for file in files_of(path):
            if not ignore(file):
                digest.update(str(file.relative_to(path.parent if path.is_file() else path)).encode() + b"\0")
                digest.update(bytes.fromhex(file_hash(file)))
    return digest.hexdigest()


def files_of(path: Path) -> list[Path]:
    """The file, or every file in a folder, sorted, without compiled Python. OSError for a folder in it that cannot be
    listed, which `rglob` would leave out.
    """
    if not path.is_dir():
        return [require(path)]
    folders = os.walk(path, onerror=_raise)
    found = (Path(folder, name) for folder, _, names in folders for name in names)
    return sorted(item for item in found if item.is_file() and item.parent.name != "__pycache__")


def _raise(error: OSError) -> None:
    raise error


def is_page_of_code(file: Path) -> bool:
    """Whether it is a README in a folder of code, which no result depends on. `.dvcignore` says the same to DVC."""
    return file.name == "README.md" and file.parts[0] == "tasks"


def file_hash(file: Path) -> str:
    """SHA-256 of a file's bytes, cached while it is unchanged: weights of many GB are hashed at each step."""
    place, version = _version_of(require(file))
    known = _hashes.get(place)
    if known is not None and known.version == version:
        return known.digest
    with file.open("rb") as stream:
        found = _Hash(version, hashlib.file_digest(stream, "sha256").hexdigest())  # in chunks
    if time.time_ns() - version.modified > SETTLED_NANOSECONDS and _version_of(file) == (place, version):
        _hashes[place] = found
    return found.digest


def _version_of(file: Path) -> tuple[tuple[int, int], _Version]:
    found = file.stat()
    return (found.st_dev, found.st_ino), _Version(found.st_size, found.st_mtime_ns)


def dvc_md5(file: Path) -> str:
    """As DVC 3 hashes a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def json_hash(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def number_of(name: str) -> int:
    """`iteration-0080` → 80."""
    return int(name.rsplit("-", 1)[1])


def natural_order(name: str) -> list[str | int]:
    """A sort key: `iteration-10000` comes after `iteration-9999`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def names_in(folder: Path, ending: str = "") -> list[str]:
    """Those that end so, sorted; none without such a folder. Unlike `glob`, OSError where it cannot be listed."""
    return sorted(name for name in os.listdir(folder) if name.endswith(ending)) if folder.is_dir() else []


def numbered_folders(folder: Path) -> list[Path]:
    """The folders `iteration-<number>` or `step-<number>`, by number. As `names_in`."""
    names = [name for name in names_in(folder) if re.fullmatch(r"(iteration|step)-\d+", name)]
    return [folder / name for name in sorted(names, key=natural_order)]


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make `target` a hard link to `source`, or a copy if the file system has no links."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # depends on the file system: EPERM, ENOTSUP, EMLINK, EXDEV and others
        shutil.copy2(source, target)


def is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
