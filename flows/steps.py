"""A stage as a Prefect task: `dvc repro --single-item <stage>` in its own process group, its lines passed on at once.
What is edited while it runs counts from the next run (`tasks/pipeline/dvc_repro.py`).

DVC caches the stages; Prefect's task cache is off, since it would not notice a changed or deleted file.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from flows.dead_locks import release_dead_locks
from flows.fork_server import ForkServer, forks_log
from flows.processes import Guardian, OutOfTime, child_environment, run_streamed
from tasks.core.passing_faults import PASSING_STATUS
from tasks.core.progress import spell
from tasks.core.secrets import hide_known_secrets
from tasks.core.settings import Paths
from tasks.core.text import one_line
from tasks.pipeline.settings import PipelineSettings
from tasks.stages.promote.origin import find_edit

REPRO = "tasks.pipeline.dvc_repro"
# What DVC prints around a stage's lines; hidden.
RUNNING = "Running stage '{stage}':"
CHATTER = re.compile(
    "|".join(
        (
            r"Running stage '",
            r"> ",
            r"(Generating|Updating) lock file",
            r"To track the changes with git|\tgit add",
            r"To enable auto staging|\tdvc config core\.autostage",
            r"Use `dvc push`",
            r"Data and pipelines are up to date",
            r"Stage '.*' (didn't change|is cached)",
            r"ERROR: failed to reproduce '.*': failed to run: ",
            r"Process '.*' with \(Pid \d+\), in RWLock-file",
        )
    )
)


# What DVC prints when a lock is taken: a `dvc` by hand may be at work. `exited with` names the status of our command.
LOCKED = re.compile(r"ERROR: Unable to acquire lock|ERROR: '.*' is busy|.*database is locked")
EXITED = re.compile(r"ERROR: failed to reproduce .*exited with (\d+)$")


class StageFailed(ValueError):
    """A stage failed and has printed its error; this message says where the flow stopped."""


class StageInterrupted(StageFailed):
    """It failed for a network, a server or a lock, so it may succeed when it is tried again."""

    is_passing = True


@dataclass(frozen=True, slots=True)
class StageRun:
    stage: str
    seconds: float
    is_cached: bool


class Stages:
    """Starts this flow's children: with the guardian, a limit of time, and a terminal where a person watches one."""

    def __init__(self, guardian: Guardian, settings: PipelineSettings, *, model: str, is_shown: bool):
        self.guardian, self.settings, self.model, self.is_shown = guardian, settings, model, is_shown
        self.is_terminal = is_shown and sys.stdout.isatty()
        self._forks: ForkServer | None = None

    def close(self) -> None:
        if self._forks is not None:
            self._forks.close()

    def run(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> StageRun:
        output = _Output(name, self.is_shown)
        started = time.monotonic()
        timeout_seconds = self.settings.stage_timeout_hours.seconds(name)
        if self._forks is None:
            self._forks = ForkServer(self.guardian, forks_log())
        try:
            status = run_streamed(
                [sys.executable, "-m", *(["tasks.core.forked"] if command[0] == REPRO else []), *command],
                env={**child_environment(), **self._forks.variables, **env},
                guardian=self.guardian,
                on_line=output,
                is_terminal=self.is_terminal,
                timeout_seconds=timeout_seconds,
            )
        except OutOfTime:
            raise StageFailed(
                f"{name} was ended after {spell(timeout_seconds or 0)}, which is pipeline.stage_timeout_hours.{name}, "
                f"so nothing after it ran. Raise that, or see what it waited for, and run again: it goes on from its "
                f"last checkpoint."
            ) from None
        if status != 0:
            raise _failure(name, status, output)
        return StageRun(name, round(time.monotonic() - started, 3), is_cached=not output.has_run)

    def run_task(self, task: Task[..., StageRun], *args: Any, **kwargs: Any) -> StageRun:
        """Run one of the tasks below, again after a fault that may have passed."""
        first, most = self.settings.retry_delay_seconds, self.settings.max_retries
        retried = task.with_options(
            retries=most,
            retry_delay_seconds=[first * 2**number for number in range(most)],
            retry_condition_fn=_may_succeed,
        )
        return retried(*args, stages=self, **kwargs)


def _failure(name: str, status: int, output: _Output) -> StageFailed:
    if status == PASSING_STATUS or output.may_pass:
        return StageInterrupted(
            f"{name} met a fault of a network, a server or a lock{output.last_error}, so nothing after it ran. "
            f"Put that right and run again: finished stages are not repeated."
        )
    how = f"was ended by signal {-status}" if status < 0 else "failed"
    return StageFailed(
        f"{name} {how}, so nothing after it ran; its own message is above{output.last_error}. "
        f"Correct that and run again: finished stages are not repeated."
    )


def _may_succeed(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.result(raise_on_failure=False), StageInterrupted)


@task(cache_policy=NO_CACHE, task_run_name="{stages.model} {stage}")
def run_stage(stage: str, stages: Stages, env: Mapping[str, str], *, force: bool = False) -> StageRun:
    """Bring one DVC stage up to date, with `force` also where nothing changed; StageFailed where it fails."""
    release_dead_locks()
    return stages.run(stage, [REPRO, "--single-item", *(["--force"] if force else []), stage], env)


@task(cache_policy=NO_CACHE, task_run_name="{stages.model} {name}")
def run_command(name: str, stages: Stages, env: Mapping[str, str], arguments: Sequence[str] = ()) -> StageRun:
    """Run `python -m tasks <name>`, such as doctor, promote or report, which are no DVC stages."""
    return replace(stages.run(name, ["tasks", name, *arguments], env), is_cached=False)


def refuse_edits(stage: str, paths: Paths) -> None:
    """After a stage: StageFailed where what it or an earlier one ran with was edited since, as promotion would say only
    after the others have run.
    """
    edit = find_edit(stage, paths)
    if edit is None:
        return
    repeated = f"only {stage}, which began with it," if edit.is_in_last else "nothing"
    again = (
        f"It read the edit after DVC had begun it: `dvc commit -f {edit.stage}` keeps its results. Then run again."
        if edit.in_lock
        else f"Run again, and what reads the edit is run with it; or undo it first, and {repeated} is repeated."
    )
    raise StageFailed(f"{edit.told}. So nothing after {stage} ran: promotion takes no results of two recipes. {again}")


class _Output:
    def __init__(self, stage: str, is_shown: bool):
        self.stage, self.is_shown = stage, is_shown
        self.has_run = self.may_pass = False
        self.last_error = ""
        self.was_chatter = True
        self.logger = get_run_logger()

    def __call__(self, line: str) -> bool:
        line = hide_known_secrets(line)  # DVC and tools print what they like
        self.has_run = self.has_run or line == RUNNING.format(stage=self.stage)
        exited = EXITED.match(line)
        self.may_pass = self.may_pass or bool(LOCKED.match(line) or (exited and int(exited[1]) == PASSING_STATUS))
        if line.startswith("error: "):
            self.last_error = f" ({one_line(line.removeprefix('error: '))})"
        is_chatter = bool(CHATTER.match(line)) or (self.was_chatter and not line.strip())
        self.was_chatter = is_chatter
        if not is_chatter and line.strip():
            self.logger.info(line)
        return self.is_shown and not is_chatter
