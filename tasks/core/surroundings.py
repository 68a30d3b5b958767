"""The machine around a run: no proxy for our own servers, and checks that a folder can take results.

Company networks set a proxy for every program, and a server on loopback does not answer through it. Folder names may
contain characters that databases and templates interpret; folders may belong to somebody else.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import pwd
import shlex
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NO_PROXY = ("NO_PROXY", "no_proxy")  # some programs read one, some the other
SOCKS_VARIABLES = ("ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy")
# Each was tried: `?` ends a database's URL (SQLAlchemy), `%20` is a space and `"` beside `'` ends a text (MLflow), `$`
# and braces are replaced (Prefect, DVC), a colon ends the folder on the PATH. Results then go elsewhere, or nowhere.
READ_AS_THEIR_OWN = '?%${}:"'
NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
PROCESSES = Path("/proc")
# Never a project: a recursive command there would change the system.
SYSTEM_FOLDERS = (
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/sbin",
    "/srv", "/sys", "/tmp", "/usr", "/var",
)  # fmt: skip


def exempt_loopback() -> None:
    """Let this process and its children reach 127.0.0.1 without a proxy. Keeps other exemptions."""
    known = {name: os.environ[name] for name in NO_PROXY if os.environ.get(name)}
    for name in NO_PROXY:
        hosts = [host.strip() for host in known.get(name, next(iter(known.values()), "")).split(",") if host.strip()]
        if "*" not in hosts:
            os.environ[name] = ",".join(dict.fromkeys([*hosts, *LOOPBACK]))


def refuse_unusable_socks(environment: Mapping[str, str]) -> None:
    """ValueError for a SOCKS proxy that httpx cannot use: Prefect's client would always fail."""
    found = [name for name in SOCKS_VARIABLES if environment.get(name, "").lower().startswith("socks")]
    if found and importlib.util.find_spec("socksio") is None:
        without = " ".join(f"-u {name}" for name in found)
        raise ValueError(
            f"{found[0]} names a SOCKS proxy, which needs the package socksio. That is not installed, so no flow "
            f"could reach its own server. Run `.venv/bin/pip install socksio`, or start without: env {without} …"
        )


def check_path(folder: Path) -> None:
    """ValueError if the path contains a character that other programs interpret."""
    odd = [letter for letter in str(folder) if letter in READ_AS_THEIR_OWN or not letter.isprintable()]
    if odd:
        raise ValueError(
            f"{str(folder)!r}: the path of this folder has {odd[0]!r} in it, to which databases and templates "
            f"give a meaning, so results would go elsewhere. Rename the folder, or move the project to another."
        )


def check_place(artifacts: Path) -> None:
    """Make the folder of results and check it; ValueError if its path or its type does not work."""
    check_path(artifacts.absolute())
    ours = (artifacts, *([] if artifacts.is_absolute() else artifacts.parents))
    if link := next((path for path in ours if path.is_symlink()), None):
        raise ValueError(
            f"{link} is a link to {link.readlink()}, and DVC writes no results through a link. Remove it. To keep "
            f"results on another disk, move the whole project there, or mount that folder here (mount --bind)."
        )
    try:
        artifacts.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(
            f"{artifacts} is a file, and results go to a folder of that name. Move the file away, or set "
            f"paths.artifacts to another folder."
        ) from None
    check_writable(artifacts, *(path for path in artifacts.iterdir() if path.is_dir()))


def check_writable(*folders: Path) -> None:
    """OSError if a folder takes no new file; `not_writable` explains it."""
    for folder in folders:
        with tempfile.TemporaryFile(dir=folder):
            pass


def not_writable(error: BaseException) -> str | None:
    """The message for a file or folder without permission: its owner, and what to do. None for other errors."""
    if not isinstance(error, OSError) or error.errno not in NOT_OURS or not isinstance(error.filename, str):
        return None
    place = Path(error.filename)
    place = next((path for path in (place, *place.parents) if os.path.lexists(path)), Path())
    if error.errno == errno.EROFS:
        return (
            f"{place} cannot be written, because its file system is read-only, so results cannot be stored. Mount it "
            f"for writing, or copy the project to where you may write."
        )
    owner, user = _name(place.lstat().st_uid), _name(os.geteuid())
    is_own = owner == user
    whose = "its permissions forbid it" if is_own else f"it belongs to {owner} and you are {user}"
    told = f"{place} cannot be read or written ({whose}), so no work can be done."
    if not _is_the_projects(place):
        return f"{told} It is not this project's: choose another folder (paths.artifacts, where results go there)."
    remedy = shlex.join(["chmod", "-R", "u+rwX", str(place)] if is_own else ["sudo", "chown", "-R", user, str(place)])
    return f"{told} Run `{remedy}`, or work in a copy."


def _is_the_projects(place: Path) -> bool:
    """Whether it is inside the project in the working directory, on the same mount."""
    project, place = Path.cwd(), place.resolve()
    return str(project) not in SYSTEM_FOLDERS and place.is_relative_to(project) and not os.path.ismount(place)


def seconds_since_start() -> float:
    """How long this process has run, interpreter start included, by a monotonic clock: psutil uses the time of day, and
    after the clock was set, a run took −107,809 s.
    """
    clock = time.clock_gettime(time.CLOCK_BOOTTIME) if PROCESSES.exists() else time.time()
    return clock - process_start(os.getpid())


def process_start(pid: int) -> float:
    """When a process began, in seconds since boot (on other systems than Linux, the time of day): with the pid it
    identifies the process. ProcessLookupError if there is none.
    """
    import psutil

    try:
        if not PROCESSES.exists():
            return float(psutil.Process(pid).create_time())
        fields = (
            (PROCESSES / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except (FileNotFoundError, psutil.NoSuchProcess):
        raise ProcessLookupError(f"process {pid} is gone") from None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, the 22nd field


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # a container's user has no name
        return str(user)
