"""The process that uploads while a stage works, so that a slow or refusing S3 never stops one.

`uploading` starts it, with what to upload as the first line of its standard input. It uploads checkpoints as they come.
The line `done` means that the stage has succeeded: it uploads the results, and ends. The end of its input without that
line means that the stage has failed or was killed: it uploads the last checkpoint, and ends. What fails is tried again
for as long as the stage works, and told once until it succeeds. Its exit status says whether everything was sent.
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
from tasks.storage.client import Changed, Store, connect, require_boto3
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
    seconds, remedy = 0.0, ""  # a person or a signal ends the stage: at once
    try:
        yield
        _order(child, DONE)
        seconds, remedy = sections.storage.finish_seconds, "`python -m tasks report` sends what is missing."
    except Exception:
        seconds, remedy = AFTER_A_FAILURE_SECONDS, "The last checkpoint is here, and the next run sends it."
        raise
    finally:
        failure = _finish(child, seconds)
        shutil.rmtree(staging_folder(artifacts, stage), ignore_errors=True)  # of a child that was killed
        if failure is not None and seconds:
            warn(f"warning: paths.remote: {remote} does not have all of {stage} yet, {failure}. {remedy}")


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


def _finish(child: subprocess.Popen[str], seconds: float) -> str | None:
    """Why not everything was sent; None where it was."""
    assert child.stdin is not None
    with suppress(OSError):
        child.stdin.close()
    try:
        status = child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"after {seconds:g} s"
    return f"since its upload ended with status {status}" if status else None


def staging_folder(artifacts: str, stage: str) -> Path:
    """Of the links that are uploaded, finished or not."""
    return Path(artifacts) / ".mirror" / stage


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
    is_sent = sync.upload_results() if order == DONE else sync.upload_checkpoints(is_last=True)
    return 0 if is_sent else 1


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
        self.staging = staging_folder(task.artifacts, task.stage)
        self.store: Store | None = None
        self.uploaded: list[tuple[str, int]] = []
        self.pause = LOOK_SECONDS
        self.failure: str | None = None
        self.is_told, self.is_passing = False, True

    def upload_checkpoints(self, *, is_last: bool = False) -> bool:
        """Whether all that are here are there; a failure is followed by another call, unless this one `is_last`."""
        if self.resume is None or self.url is None:
            return True
        folder, url = self.resume, self.url
        now = _versions(folder)
        if now != self.uploaded:
            if not self._try(lambda store: upload_resume(store, url, folder, self.staging / "links")):
                self._tell(is_over=is_last)
                return False
            self.uploaded = now
        return True

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
            self._tell(is_over=not self.is_passing)
            if not self.is_passing:
                return False
            threading.Event().wait(self.pause)
        return True

    def _try(self, work: Callable[[Store], None]) -> bool:
        """Whether it succeeded. Else the next attempt is later, and `failure` says why."""
        try:
            self.store = self.store or connect(self.task.storage)
            work(self.store)
        except FileNotFoundError:  # the training deletes an old checkpoint; the next look finds the newer ones
            self.is_passing = True
            return False
        except (ValueError, OSError) as error:  # of boto3's own configuration too
            self.failure = str(error)
            self.is_passing = isinstance(error, (OSError, Changed)) or getattr(error, "is_passing", False)
            self.pause = min(2 * self.pause, LONGEST_WAIT_SECONDS)
            return False
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)
        self.pause, self.failure, self.is_told = LOOK_SECONDS, None, False
        return True

    def _tell(self, *, is_over: bool) -> None:
        """Once until something succeeds, and again where it `is_over` and nothing else is tried."""
        if self.failure is not None and (is_over or not self.is_told):
            hope = "" if is_over else ", and it is tried again"
            warn(f"warning: paths.remote: {self.failure} Nothing is lost: the files are here{hope}.")
            self.is_told = True


def _versions(folder: Path) -> list[tuple[str, int]]:
    found = []
    for item in resume_items(folder):
        with suppress(FileNotFoundError):
            found.append((str(item), item.stat().st_mtime_ns))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
