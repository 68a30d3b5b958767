"""The process that uploads while a stage works, so that a slow or refusing S3 never stops one.

`uploading` starts it, with what to upload as the first line of its standard input. It uploads checkpoints as they come.
The line `done` means that the stage has succeeded: it uploads the results, and ends. The end of its input without that
line means that the stage has failed or was killed: it uploads the last checkpoint, and ends. What fails is tried again
for as long as the stage works, and told once.
"""

from __future__ import annotations

import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.core.records import Record
from tasks.core.settings import Paths
from tasks.core.terminal import warn
from tasks.core.urls import parse_url
from tasks.storage.client import Changed, StorageError, Store, connect, require_boto3
from tasks.storage.folders import remove_folder
from tasks.storage.mirror import (
    result_files,
    resume_items,
    resume_url,
    upload_results,
    upload_resume,
)
from tasks.storage.settings import StorageSections, StorageSettings

DONE = "done"
LOOK_SECONDS = 1.0  # between looks for a new checkpoint
LONGEST_WAIT_SECONDS = 60.0  # between attempts after failures
AFTER_A_FAILURE_SECONDS = 10.0  # for the last checkpoint of a stage that has failed


class Task(Record):
    """`names`: folders of results, uploaded when the stage is done. `resume`: the folder of its checkpoints."""

    remote: str
    storage: StorageSettings
    artifacts: str
    names: list[str]
    frozen: str | None
    stage: str
    resume: str | None


@contextmanager
def uploading(
    sections: StorageSections, names: list[str], *, stage: str, frozen: Path | None = None, resume: Path | None = None
) -> Iterator[None]:
    """Upload beside the block and after it, for `storage.finish_seconds` at most; nothing without `paths.remote`."""
    remote, artifacts = sections.paths.remote, sections.paths.artifacts
    if remote is None:
        yield
        return
    require_boto3()
    task = Task(
        remote=remote,
        storage=sections.storage,
        artifacts=artifacts,
        names=names,
        frozen=None if frozen is None else str(frozen),
        stage=stage,
        resume=None if resume is None else str(resume),
    )
    child = _start(task)
    seconds = 0.0  # a person or a signal ends the stage: at once
    try:
        yield
        _order(child, DONE)
        seconds = sections.storage.finish_seconds
    except Exception:
        seconds = AFTER_A_FAILURE_SECONDS
        raise
    finally:
        _finish(child, seconds, f"{remote} does not have all of {stage} yet")


def _start(task: Task) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tasks.storage.uploader"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    _order(child, task.model_dump_json())
    return child


def _order(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    with suppress(OSError):  # it was killed
        child.stdin.write(f"{line}\n")
        child.stdin.flush()


def _finish(child: subprocess.Popen[str], seconds: float, what: str) -> None:
    assert child.stdin is not None
    with suppress(OSError):
        child.stdin.close()
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        if seconds:
            warn(f"warning: paths.remote: {what}, after {seconds:g} s. `python -m tasks report` sends what is missing.")


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    orders = _orders()
    task = Task.model_validate_json(orders.get() or "")
    sync = Sync(task)
    order: str | None = ""
    while order == "":
        sync.upload_checkpoints()
        with suppress(queue.Empty):
            order = orders.get(timeout=sync.pause)
    if order == DONE:
        return 0 if sync.upload_results() else 1
    sync.upload_checkpoints()
    return 0


def _orders() -> queue.Queue[str | None]:
    """The lines of standard input, and None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


class Sync:
    def __init__(self, task: Task):
        self.task = task
        self.remote = parse_url(task.remote)
        self.resume = None if task.resume is None else Path(task.resume)
        self.url = None if self.resume is None else resume_url(self.remote, task.stage, self.resume)
        self.staging = Path(task.artifacts) / ".mirror" / task.stage
        self.store: Store | None = None
        self.uploaded: list[tuple[str, int]] = []
        self.pause = LOOK_SECONDS
        self.is_told, self.is_passing = False, True

    def upload_checkpoints(self) -> None:
        if self.resume is None or self.url is None:
            return
        folder, url = self.resume, self.url
        now = _versions(folder)
        if now != self.uploaded and self._try(lambda store: upload_resume(store, url, folder, self.staging)):
            self.uploaded = now

    def upload_results(self) -> bool:
        """Tried until it succeeds, or this process is ended; False for an error that stays."""
        task = self.task
        paths, frozen = Paths(task.artifacts), None if task.frozen is None else Path(task.frozen)

        def upload(store: Store) -> None:
            for name in task.names:
                upload_results(store, self.remote, name, result_files(name, paths, frozen), self.url)
            if self.url is not None:
                remove_folder(store, self.url)  # its snapshots are among the results

        while not self._try(upload):
            if not self.is_passing:
                return False
            threading.Event().wait(self.pause)
        return True

    def _try(self, work: Callable[[Store], None]) -> bool:
        """Whether it succeeded. Else the next attempt is later, and the first failure is told."""
        try:
            self.store = self.store or connect(self.task.storage)
            work(self.store)
        except FileNotFoundError:  # the training deletes an old checkpoint; the next look finds the newer ones
            return False
        except (StorageError, OSError) as error:
            self.is_passing = not isinstance(error, StorageError) or error.is_passing or isinstance(error, Changed)
            self.pause = min(2 * self.pause, LONGEST_WAIT_SECONDS)
            if not self.is_told:
                warn(f"warning: paths.remote: {error} Nothing is lost: the files are here, and it is tried again.")
                self.is_told = True
            return False
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)
        self.pause = LOOK_SECONDS
        return True


def _versions(folder: Path) -> list[tuple[str, int]]:
    found = []
    for item in resume_items(folder):
        with suppress(FileNotFoundError):
            found.append((str(item), item.stat().st_mtime_ns))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
