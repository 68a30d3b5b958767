"""C sources of this folder as a library that Python calls, compiled once per machine by its own compiler.

A call through ctypes releases Python's lock, so threads compute side by side. Where no compiler succeeds, callers use
torch: slower, and the same numbers but for the order of sums; the doctor says why (`fault_of`). A library ends with its
own hash, since one that was cut short would end the process that loads it; such a one is compiled anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tasks.core.text import one_line
from tasks.core.workspace import CODE

FOLDER = Path(__file__).resolve().parent
CACHE = CODE / ".cache" / "native"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-trapping-math",
    "-Wall",
)
SECONDS = 120.0  # after which a compiler is taken to hang
HASH_BYTES = hashlib.sha256().digest_size  # at the end of a library, where the loader does not look
NOEXEC = "noexec"  # of a file system, as Docker mounts a tmpfs
_FAULTS: dict[str, str] = {}


def sources_in_c() -> list[Path]:
    """Relative to the root."""
    return sorted(file.relative_to(CODE) for file in FOLDER.iterdir() if file.suffix in (".c", ".h"))


def find_compilers() -> list[str]:
    """Each once, though `cc` is often a link to another."""
    known: dict[str, str] = {}
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        known.setdefault(os.path.realpath(compiler), compiler)
    return list(known.values())


@cache
def load_library(name: str, *defines: str) -> ctypes.CDLL | None:
    """The functions of `name`.c, which may include this folder's headers; None where no compiler succeeds."""
    for compiler in find_compilers():
        file = CACHE / f"{name}-{_key(compiler, name, defines)}.so"
        try:
            if not _is_whole(file):
                _compile(compiler, name, defines, file)
            return ctypes.CDLL(str(file))
        except (OSError, subprocess.SubprocessError) as error:
            _FAULTS[name] = f"{compiler}: {_in_words(error)}"
    return None


def fault_of(name: str) -> str | None:
    """Why the last compiler did not succeed, where none did."""
    return None if load_library(name) is not None else _FAULTS.get(name, "there is none")


def _compile(compiler: str, name: str, defines: Sequence[str], file: Path) -> None:
    """Under another name first: several processes may compile at once, and none may load half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [compiler, *FLAGS, *(f"-D{define}" for define in defines), str(FOLDER / f"{name}.c"), "-o", str(made)]
        _run([*command, "-lm"])
        with made.open("rb+") as stream:
            digest = hashlib.sha256(stream.read()).digest()
            stream.write(digest)
            stream.flush()
            os.fsync(stream.fileno())
        made.replace(file)


def _run(command: Sequence[str]) -> None:
    """A compiler starts others, which end with it."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            _, told = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=told)


def _is_whole(file: Path) -> bool:
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-HASH_BYTES]).digest() == content[-HASH_BYTES:]


def _in_words(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        return one_line(next((line for line in lines if "error" in line), f"ended with status {error.returncode}"))
    if isinstance(error, subprocess.TimeoutExpired):
        return f"did not end within {SECONDS:.0f} s"
    if CACHE.exists() and os.statvfs(CACHE).f_flag & os.ST_NOEXEC:
        return f"{CACHE} is mounted {NOEXEC}, so what it made cannot be loaded"
    return one_line(error)


def _key(compiler: str, name: str, defines: Sequence[str]) -> str:
    """Of all that the compiled code depends on: sources, flags, compiler, processor."""
    digest = hashlib.sha256()
    for source in sources_in_c():
        digest.update((CODE / source).read_bytes())
    found = os.stat(compiler)
    digest.update(repr((FLAGS, defines, compiler, found.st_size, found.st_mtime_ns, _processor())).encode())
    return digest.hexdigest()[:16]


def _processor() -> list[str]:
    """Which instructions it has: a folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
