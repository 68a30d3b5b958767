"""C sources of this folder as a library that Python calls, compiled once per machine by its own compiler.

A call through ctypes releases Python's lock, so threads compute side by side. Where there is no compiler, or it fails,
callers use torch: slower, and the same numbers but for the order of sums.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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


def sources_in_c() -> list[Path]:
    """Relative to the root."""
    return sorted(file.relative_to(CODE) for file in FOLDER.iterdir() if file.suffix in (".c", ".h"))


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


@cache
def load_library(name: str, *defines: str) -> ctypes.CDLL | None:
    """The functions of `name`.c, which may include this folder's headers; None where they cannot be compiled."""
    compiler = find_compiler()
    if compiler is None:
        return None
    file = CACHE / f"{name}-{_key(compiler, name, defines)}.so"
    try:
        if not file.exists():
            _compile(compiler, name, defines, file)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str, name: str, defines: Sequence[str], file: Path) -> None:
    """Under another name first: several processes may compile at once, and none may load half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [compiler, *FLAGS, *(f"-D{define}" for define in defines), str(FOLDER / f"{name}.c"), "-o", str(made)]
        subprocess.run([*command, "-lm"], check=True, capture_output=True, timeout=SECONDS)
        made.replace(file)


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
