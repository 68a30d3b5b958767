"""The ranks that a command starts on its machine, by torch's elastic launcher, and how their end is told, also of those
that it starts on Ray's cluster (`on_ray.py`).

All ranks run into the same mistake, and where one is lost all others fail for it. So a rank writes its message where
torch's launcher reads it and is silent itself, and this command tells the one that came first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tasks.core.child_processes import own_guardian
from tasks.core.files import write_json
from tasks.core.passing_faults import PASSING_STATUS, PassingFault
from tasks.core.terminal import warn
from tasks.models.settings import ComputeSettings, LaunchSettings
from tasks.models.torch_setup import num_gpus
from tasks.pipeline.cli_errors import INTERRUPTED_STATUS, message_of, status_of

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import SignalException

MESSAGE_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's: where a rank says why it ends
BY_AGENT = (-signal.SIGTERM, 128 + signal.SIGTERM)  # how ranks end that torch ended, because another one did


class LostRank(PassingFault):
    """Another rank is gone, which is a consequence; that one's own end is the cause."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended: its exit status, or minus a signal; what it said, and when. `is_lost`: it lost another one."""

    rank: int
    status: int
    message: str = ""
    seconds: int = 0
    is_lost: bool = False

    @property
    def is_mistake(self) -> bool:
        """It would end so again."""
        return self.status > 0 and self.status not in (PASSING_STATUS, *BY_AGENT)

    def describe(self, size: int) -> str:
        how = f"was ended by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
        return f"rank {self.rank} of {size} {how}{f' ({self.message})' if self.message else ''}"


def supervise(stage: str, launch: LaunchSettings, compute: ComputeSettings, options: Sequence[str] = ()) -> None:
    """Start the ranks of a stage on this machine, each with `options`, and wait for them; start all again where one
    has died.
    """
    refuse_too_many(launch.num_trainers, num_gpus(compute))
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    own_guardian().watch_descendants()
    _silence_torch()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.num_trainers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a free port
        max_restarts=0,  # torch would also start again after a mistake in the settings
        monitor_interval=0.2,
    )

    def run() -> list[Ending]:
        try:
            elastic_launch(config, sys.executable)("-m", "tasks", stage, *options)
        except SignalException as error:
            _end_as(error)
        except ChildFailedError as error:
            return [
                ending_of(rank, failure.exitcode, failure.error_file_data) for rank, failure in error.failures.items()
            ]
        return []

    run_again(stage, launch, run)


def run_again(stage: str, launch: LaunchSettings, run: Callable[[], Sequence[Ending]]) -> None:
    """`run` all ranks to their end, and again where one has died. It gives how those ended that failed."""
    for restart in range(launch.max_restarts + 1):
        ended = run()
        if not ended:
            return
        _raise_mistake(ended)
        left = launch.max_restarts - restart
        found = f"{stage}: {cause_of(ended).describe(launch.num_trainers)}"
        if left:
            warn(f"warning: {found}, so all were ended; starting again from the last checkpoint ({left} times at most)")
    raise PassingFault(
        f"{found}, so all were ended; launch.max_restarts is {launch.max_restarts}. What was finished is in the last "
        f"checkpoint: run the same command again to go on from it. Signal 9 often is the machine, out of memory."
    )


def refuse_too_many(num_trainers: int, num_gpus: int) -> None:
    """ValueError where ranks of one machine would share a GPU, which NCCL refuses; they may share processors."""
    if 0 < num_gpus < num_trainers:
        raise ValueError(
            f"launch.num_trainers is {num_trainers}, and this machine has {num_gpus} GPUs, so some ranks would have "
            f"none. Set launch.num_trainers to {num_gpus} or fewer, or start them on more machines (launch.launcher: "
            f"external)."
        )


def cause_of(ended: Sequence[Ending]) -> Ending:
    """One that was killed; else the first that did not end for another's sake."""
    return min(ended, key=lambda end: (end.status in BY_AGENT, end.status > 0, end.is_lost, end.seconds, end.rank))


@contextmanager
def told_by_supervisor(*, debug: bool) -> Iterator[None]:
    """In a rank that `supervise` started: its error becomes a message there, and a status here."""
    file = Path(os.environ[MESSAGE_FILE])
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED_STATUS) from None
    except Exception as error:
        if debug:
            warn(traceback.format_exc().rstrip("\n"))
        seconds = int(time.time())
        write_json(file, {"message": message_of(error), "timestamp": seconds, "is_lost": isinstance(error, LostRank)})
        raise SystemExit(status_of(error)) from None


def ending_of(rank: int, status: int, told: Mapping[str, Any]) -> Ending:
    """`told`: what `told_by_supervisor` wrote."""
    if "timestamp" not in told:  # torch makes a message up for a rank that left none
        return Ending(rank, status)
    return Ending(rank, status, str(told["message"]), int(told["timestamp"]), told.get("is_lost") is True)


def _raise_mistake(ended: Sequence[Ending]) -> None:
    """As the rank would have ended alone; nothing where none made one."""
    mistakes = [end for end in ended if end.is_mistake]
    if not mistakes:
        return
    first = cause_of(mistakes)
    if first.message:
        raise ValueError(first.message)
    raise SystemExit(first.status)  # which said it itself, as for an option that does not exist


def _end_as(error: SignalException) -> NoReturn:
    """As this command ends without ranks, which have ended by the same signal."""
    if error.sigval == signal.SIGINT:
        raise KeyboardInterrupt from None
    raise SystemExit(128 + error.sigval) from None


def _silence_torch() -> None:
    """What it says is told in one line here. Each of its loggers has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
