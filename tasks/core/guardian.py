"""The program of `child_processes.Guardian`: it outlives its parent to end the parent's children.

Orders on stdin, one per line: `+GROUP FOLDER` (end this process group, then remove this folder, which may be empty),
`-GROUP` (the group has ended), `/FOLDER` (remove this absolute path), `*` (end every descendant of the parent), `.` (do
not). When the parent is gone, the pipe closes and the guardian acts. It imports only the standard library, without
site-packages, so it starts in 20 ms.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

LOOK_SECONDS = 0.25
Processes = dict[int, str]  # process id → start time, which tells apart processes with the same id


def main(parent: int, grace_seconds: float) -> None:
    groups: dict[int, str] = {}
    folders: list[str] = []
    descendants: Processes | None = None
    text = b""
    while True:
        if select.select([0], [], [], LOOK_SECONDS)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                break
            *orders, text = (text + piece).split(b"\n")
            for order in orders:
                if order[:1] == b"/":
                    folders.append(order[1:].decode())
                    continue
                sign, (number, _, folder) = order[:1], order[1:].decode().partition(" ")
                if sign == b"+":
                    groups[int(number)] = folder
                elif sign == b"-":
                    groups.pop(int(number), None)
                else:
                    descendants = {} if sign == b"*" else None
        elif os.getppid() != parent:  # a fork of the parent may keep the pipe open
            break
        if descendants is not None:
            descendants = find_descendants(parent, descendants)
    end(groups, descendants or {}, grace_seconds)
    remove([*groups.values(), *folders])


def find_descendants(parent: int | None, known: Processes) -> Processes:
    """The living known processes, and all descendants of them and of the parent."""
    table = _process_table()
    found = {pid: start for pid, start in known.items() if table.get(pid, (0, ""))[1] == start}
    roots = {*found, *([] if parent is None else [parent])}
    while new := {pid for pid, (owner, _) in table.items() if owner in roots} - roots - {os.getpid()}:
        roots |= new
        found |= {pid: table[pid][1] for pid in new}
    return found


def _process_table() -> dict[int, tuple[int, str]]:
    """Process id → (parent, start time), without zombies, from /proc/PID/stat (proc(5))."""
    table = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                table[int(name)] = (int(fields[1]), fields[19].decode())
    return table


def end(groups: dict[int, str], descendants: Processes, grace_seconds: float) -> None:
    """SIGTERM to all, wait for at most the grace, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        alive = set(find_descendants(None, descendants)) if descendants else set()
        for target in [*groups, *alive]:
            _signal(target, number, is_group=target in groups)
        deadline = time.monotonic() + (grace_seconds if number == signal.SIGTERM else 0)
        while time.monotonic() < deadline and (
            any(_signal(group, 0, is_group=True) for group in groups)
            or (descendants and find_descendants(None, descendants))
        ):
            time.sleep(0.05)


def remove(folders: list[str]) -> None:
    for folder in filter(None, folders):
        import shutil  # rarely needed, and as slow to import as the rest of this program

        shutil.rmtree(folder, ignore_errors=True)


def _signal(target: int, number: int, *, is_group: bool) -> bool:
    try:
        (os.killpg if is_group else os.kill)(target, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
