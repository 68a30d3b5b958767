"""Several processes that train one policy: started here by torch's elastic launcher, or found in the environment.

Every rank runs the same command. Rank 0 takes the locks, runs the stage and writes; the others follow it. One that dies
ends all, since none can go on alone; what was started here is started again from the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.child_processes import own_guardian
from tasks.core.files import json_hash
from tasks.core.passing_faults import PASSING_STATUS, PassingFault
from tasks.core.settings import read_params
from tasks.core.terminal import warn
from tasks.core.text import one_line
from tasks.models.settings import ComputeSettings, LaunchSettings
from tasks.models.torch_setup import find_device

if TYPE_CHECKING:
    from tasks.learning.shared.ranks import Ranks

LAUNCHED = ("train",)  # the stages that several processes compute
MEETING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
SUPERVISED = "TORCHELASTIC_RUN_ID"  # torch's: who started this process tells why one has ended
BY_AGENT = (-signal.SIGTERM, 128 + signal.SIGTERM)  # how ranks end that the agent ended, because another one did
SHARED_SECONDS = 30.0  # in which a file of rank 0 is seen by all: a network's folder may lag


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the others: `rank` of `size`, `local` on its machine."""

    rank: int
    size: int
    local: int


def place_of(launch: LaunchSettings, environment: Mapping[str, str]) -> Place | None:
    """As torchrun or Slurm noted it; None where this process is no rank. ValueError where that is not what
    `launch` says.
    """
    noted = {name: environment.get(name) or environment.get(SLURM.get(name, ""), "") for name in MEETING}
    if launch.launcher == "local" or (launch.launcher == "torchrun" and not environment.get(SUPERVISED)):
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not noted[name]]
    if missing:
        raise ValueError(
            f"launch.launcher is external, and this process has no {' and no '.join(missing)} in its environment, so "
            f"it cannot find the others. Start it by torchrun, or by srun with MASTER_ADDR and MASTER_PORT exported; "
            f"or set launch.launcher to torchrun."
        )
    if int(noted["WORLD_SIZE"]) != launch.num_trainers:
        raise ValueError(
            f"launch.num_trainers is {launch.num_trainers}, and {noted['WORLD_SIZE']} processes were started, so it is "
            f"not clear who should train. Set launch.num_trainers to {noted['WORLD_SIZE']}, or start as many."
        )
    return Place(int(noted["RANK"]), int(noted["WORLD_SIZE"]), int(noted["LOCAL_RANK"] or 0))


def supervise(stage: str, launch: LaunchSettings) -> None:
    """Start the ranks of a stage on this machine and wait for them; start all again where one has died."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    own_guardian().watch_descendants()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it is told in one line below
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
    for restart in range(launch.max_restarts + 1):
        try:
            elastic_launch(config, sys.executable)("-m", "tasks", stage)
            return
        except ChildFailedError as error:
            ended = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if mistakes := _mistakes(ended):  # which that rank has told
            raise SystemExit(mistakes[0])
        left = launch.max_restarts - restart
        found = f"{stage}: {_how_it_ended(ended, launch.num_trainers)}"
        if left:
            warn(f"warning: {found}, so all were ended; starting again from the last checkpoint ({left} times at most)")
    raise PassingFault(
        f"{found}, so all were ended; launch.max_restarts is {launch.max_restarts}. What was finished is in the last "
        f"checkpoint: run the same command again to go on from it. Signal 9 often is the machine, out of memory."
    )


def _mistakes(ended: Mapping[int, int]) -> list[int]:
    """The statuses of ranks that would end so again."""
    return [status for status in ended.values() if status > 0 and status not in (PASSING_STATUS, *BY_AGENT)]


def _how_it_ended(ended: Mapping[int, int], size: int) -> str:
    """Of the rank that was killed; the others got a SIGTERM for it, or found it gone."""
    order = {PASSING_STATUS: 1, **dict.fromkeys(BY_AGENT, 2)}
    rank, status = min(ended.items(), key=lambda item: (order.get(item[1], 0), item[0]))
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"rank {rank} of {size} {how}"


@contextmanager
def joined(place: Place, launch: LaunchSettings, compute: ComputeSettings, artifacts: Path) -> Iterator[Ranks]:
    """The ranks, once all have met and are alike. A rank that is lost is one line, or none where the process that
    started this one tells it.
    """
    ranks = _meet(place, launch, compute)
    try:
        _refuse_unlike(ranks, artifacts, seconds=min(SHARED_SECONDS, launch.meet_seconds))
        yield ranks
    except Exception as error:
        if not _is_lost(error):
            raise
        if os.environ.get(SUPERVISED):
            raise SystemExit(PASSING_STATUS) from None
        raise PassingFault(
            f"rank {ranks.number} of {ranks.size} on {socket.gethostname()} lost another one "
            f"({one_line(error, limit=120)}), and none can train alone. See that one's last lines, then run the same "
            f"command on every node again; it goes on from the last checkpoint."
        ) from error
    finally:
        with suppress(RuntimeError):
            ranks.end()


def own_gpu(place: Place, num_gpus: int) -> int:
    """ValueError where this rank would have none, or that of another."""
    if place.local < num_gpus:
        return place.local
    raise ValueError(
        f"rank {place.rank} is number {place.local + 1} on {socket.gethostname()}, where it sees {num_gpus} GPUs, so "
        f"it has none of its own. Start one rank per GPU (launch.num_trainers), and let each see all of its machine's."
    )


def _meet(place: Place, launch: LaunchSettings, compute: ComputeSettings) -> Ranks:
    """Afterwards the variables are gone: an engine that this process starts is no rank."""
    import torch

    from tasks.learning.shared.ranks import Ranks

    device = find_device(compute)
    if device.type == "cuda":
        torch.cuda.set_device(own_gpu(place, torch.cuda.device_count()))
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        return Ranks.meet(device, timeout_seconds=launch.meet_seconds)
    except RuntimeError as error:
        is_taken = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
        found = (
            f"the port of {address} is in use"
            if is_taken
            else f"the {place.size} ranks did not meet at {address} within {launch.meet_seconds:g} s"
        )
        raise PassingFault(
            f"{found} (rank {place.rank}, on {socket.gethostname()}: {one_line(error, limit=120)}), so nothing was "
            f"trained. {'Export another MASTER_PORT' if is_taken else 'See that every node was started and reaches it'}"
            f", then run again{'' if is_taken else '; launch.meet_seconds is how long they wait'}."
        ) from error
    finally:
        for name in MEETING:
            os.environ.pop(name, None)


def _refuse_unlike(ranks: Ranks, artifacts: Path, *, seconds: float) -> None:
    """ValueError where a node has other versions or settings, or does not see rank 0's folder of results in time."""
    mark = artifacts / f".ranks-{uuid.uuid4().hex}"
    if ranks.leads:
        artifacts.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        found = ranks.gather((socket.gethostname(), _versions(), mark.name))
        leader, versions, name = found[0]
        seen = ranks.gather((socket.gethostname(), _sees(artifacts / name, seconds)))
        unseen = [host for host, is_seen in seen if not is_seen]
    finally:
        mark.unlink(missing_ok=True)
    for host, others, _ in found:
        different = [key for key in versions if versions[key] != others[key]]
        if different:
            told = ", ".join(f"{key} {others[key]} and not {versions[key]}" for key in different)
            raise ValueError(
                f"{host} has {told}, which {leader} has, so the ranks would compute different things. Install the same "
                f"lock on every node, and use one checkout and one params.yaml."
            )
    if unseen:
        raise ValueError(
            f"{', '.join(dict.fromkeys(unseen))} does not see {artifacts} of {leader}, so it could not load the model. "
            f"Put the project's folder on storage that all nodes share."
        )


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("torch", "transformers", "peft")}
    params: Any = {key: value for key, value in read_params().items() if key != "paths"}
    return {"Python": platform.python_version(), **packages, "params.yaml": json_hash(params)[:8]}


def _sees(file: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return file.exists()


def _is_lost(error: Exception) -> bool:
    """What gloo and NCCL raise where another rank is gone."""
    import torch.distributed as dist

    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "connection closed by peer" in text)
    )
