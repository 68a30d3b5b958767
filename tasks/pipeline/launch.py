"""Several processes that train one policy: each finds its place in the environment, meets the others, and refuses
them where they are not alike. Who starts them is `supervise.py`, or on many nodes a launcher of somebody else's
(`outer_launcher.py`).

Every rank runs the same command. Rank 0 takes the locks, runs the stage and writes; the others follow it. One that dies
ends all, since none can go on alone.
"""

from __future__ import annotations

import os
import platform
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import SHARED_SECONDS, content_hash, json_hash
from tasks.core.passing_faults import PassingFault, is_passing
from tasks.core.settings import read_params
from tasks.core.text import one_line
from tasks.core.workspace import folder_of_code
from tasks.models.settings import ComputeSettings, LaunchSettings
from tasks.models.torch_setup import find_device
from tasks.pipeline.cli_errors import status_of
from tasks.pipeline.outer_launcher import LAUNCH
from tasks.pipeline.supervise import LostRank

if TYPE_CHECKING:
    import torch

    from tasks.learning.shared.ranks import Ranks

LAUNCHED = ("warm_start", "train")  # the stages that several processes compute
MEETING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
SUPERVISED = "TORCHELASTIC_RUN_ID"  # torch's: who started this process tells why one has ended
CODE = "tasks"
OF_TORCH = "TORCHELASTIC_"  # what torch's launcher leaves in the environment
LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "remote process exited")


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the others: `rank` of `size`, `local` on its machine."""

    rank: int
    size: int
    local: int


def place_of(launch: LaunchSettings, environment: Mapping[str, str]) -> Place | None:
    """As torchrun, Slurm or `on_ray.py` noted it; None where this process is no rank. ValueError where that is not
    what `launch` says.
    """
    noted = {name: environment.get(name) or environment.get(SLURM.get(name, ""), "") for name in MEETING}
    if launch.launcher == "local" or (launch.starts_ranks and not environment.get(SUPERVISED)):
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not noted[name]]
    if missing:
        raise ValueError(
            f"launch.launcher is external, and this process has no {' and no '.join(missing)} in its environment, so "
            f"it cannot find the others. Start it by torchrun, or by srun with MASTER_ADDR and MASTER_PORT exported; "
            f"or set launch.launcher to torchrun."
        )
    if _number(noted, "WORLD_SIZE") != launch.num_trainers:
        raise ValueError(
            f"launch.num_trainers is {launch.num_trainers}, and {noted['WORLD_SIZE']} processes were started, so it is "
            f"not clear who should train. Set launch.num_trainers to {noted['WORLD_SIZE']}, or start as many."
        )
    return Place(_number(noted, "RANK"), launch.num_trainers, local_number(environment))


def local_number(environment: Mapping[str, str]) -> int:
    """Of this process among those of its machine; 0 where nobody noted one. ValueError where that is no number."""
    name = next((name for name in ("LOCAL_RANK", SLURM["LOCAL_RANK"]) if environment.get(name)), None)
    return 0 if name is None else _number(environment, name)


def number_to_tell(stage: str, params: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    """`told_once_per_node`'s, before `params` are checked: 0 for every process that nobody else started as a rank."""
    launch = params.get("launch")
    is_external = isinstance(launch, Mapping) and launch.get("launcher") == "external"
    is_rank = stage in LAUNCHED and is_external and not environment.get(LAUNCH)
    return local_number(environment) if is_rank else 0


@contextmanager
def told_once_per_node(local: int) -> Iterator[None]:
    """Around a mistake that all ranks of a node find alike: the first, of number 0, tells it, and the others end with
    its status and without a word. What may pass is told by each: the first may be the one that was lost.
    """
    try:
        yield
    except ValueError as error:
        if local == 0 or is_passing(error):
            raise
        raise SystemExit(status_of(error)) from None


@contextmanager
def joined(place: Place, launch: LaunchSettings, compute: ComputeSettings, artifacts: Path) -> Iterator[Ranks]:
    """The ranks, once all have met and are alike. Where another rank is lost, that is the error of each that is left.
    Those that were started here have all errors, since who started them tells one.
    """
    local = place.local if launch.launcher == "external" else 0
    device = _take_device(place, compute)
    with told_once_per_node(local):
        ranks = _meet(place, launch, device)
    try:
        with told_once_per_node(local):
            _refuse_unlike(ranks)
            refuse_equal_gpus(ranks.gather((socket.gethostname(), _gpu(compute))))
            _refuse_unshared(ranks, artifacts, seconds=min(SHARED_SECONDS, launch.meet_seconds))
        yield ranks
    except Exception as error:
        if not is_lost(error):
            raise
        raise LostRank(
            f"rank {ranks.number} of {ranks.size} on {socket.gethostname()} lost another one "
            f"({one_line(error, limit=120)}), and none can train alone. See that one's last lines, then run the "
            f"same command on every node again; it goes on from the last checkpoint."
        ) from error
    finally:
        with suppress(RuntimeError):
            ranks.end()


def own_gpu(place: Place, num_gpus: int) -> int:
    """Slurm shows each of its tasks one GPU only (`--gpus-per-task=1`), which is its number 0. ValueError where this
    rank would have none.
    """
    if num_gpus == 1:
        return 0
    if place.local < num_gpus:
        return place.local
    raise ValueError(
        f"rank {place.rank} is number {place.local + 1} on {socket.gethostname()}, where it sees {num_gpus} GPUs, so "
        f"it has none of its own. Start one rank per GPU there (launch.num_trainers counts those of all machines)."
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    """ValueError with the variable's name."""
    found = environment[name]
    if not (found.isascii() and found.isdecimal()):
        raise ValueError(
            f"{name} is {found!r} in the environment of this process, and a whole number is expected, so it does not "
            f"know its place among the ranks. Correct it, or unset it where this process is no rank."
        )
    return int(found)


def _take_device(place: Place, compute: ComputeSettings) -> torch.device:
    import torch

    device = find_device(compute)
    if device.type == "cuda":
        torch.cuda.set_device(own_gpu(place, torch.cuda.device_count()))
    return device


def _meet(place: Place, launch: LaunchSettings, device: torch.device) -> Ranks:
    """Afterwards the variables are gone: an engine that this process starts is no rank."""
    from tasks.learning.shared.ranks import Ranks

    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        return Ranks.meet(device, meet_seconds=launch.meet_seconds, step_seconds=launch.step_seconds)
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
        for name in [name for name in os.environ if name in MEETING or name.startswith(OF_TORCH)]:
            del os.environ[name]


def _refuse_unlike(ranks: Ranks) -> None:
    """ValueError where a node has other versions or settings."""
    found = ranks.gather((socket.gethostname(), _versions()))
    leader, versions = found[0]
    for host, others in found:
        different = [key for key in versions if versions[key] != others.get(key)]
        if different:
            told = ", ".join(f"{key} {others.get(key)} and not {versions[key]}" for key in different)
            raise ValueError(
                f"{host} has {told}, which {leader} has, so the ranks would compute different things. Install the same "
                f"lock on every node, and use one checkout and one params.yaml."
            )


def refuse_equal_gpus(found: Sequence[tuple[str, str | None]]) -> None:
    """ValueError where two ranks compute on one GPU, of which NCCL says less. `found`: the machine and the GPU of each
    rank, None on a processor.
    """
    for number, (host, gpu) in enumerate(found):
        if gpu is not None and (host, gpu) in found[:number]:
            raise ValueError(
                f"rank {found.index((host, gpu))} and rank {number} have the same GPU of {host} ({gpu}), and each "
                f"needs one of its own. Start fewer ranks there, or give each another one (srun --gpus-per-task=1)."
            )


def _gpu(compute: ComputeSettings) -> str | None:
    """What tells the GPU of this rank from every other."""
    import torch

    if find_device(compute).type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _refuse_unshared(ranks: Ranks, artifacts: Path, *, seconds: float) -> None:
    """ValueError where a node does not see, in this time, a file in rank 0's folder of results."""
    mark = artifacts / f".ranks-{uuid.uuid4().hex}.partial"  # which the next run removes where this one is killed
    if ranks.leads:
        artifacts.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        leader, place, name = ranks.gather((socket.gethostname(), str(artifacts.absolute()), mark.name))[0]
        seen = ranks.gather((socket.gethostname(), _sees(artifacts / name, seconds)))
    finally:
        mark.unlink(missing_ok=True)
    unseen = dict.fromkeys(host for host, is_seen in seen if not is_seen)
    if unseen:
        raise ValueError(
            f"{', '.join(unseen)} does not see {place} of {leader}, so it could not load the model. Put "
            f"the project's folder on storage that all nodes share."
        )


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("torch", "transformers", "peft")}
    params = {f"{key} of params.yaml": json_hash(value)[:8] for key, value in read_params().items() if key != "paths"}
    code = content_hash(folder_of_code() / CODE, ignore=lambda file: file.name == "README.md")
    return {"Python": platform.python_version(), **packages, **params, f"{CODE}/": code[:8]}


def _sees(file: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return file.exists()


def is_lost(error: Exception) -> bool:
    """Whether a connection of gloo or NCCL to another rank was closed or gave no answer; their other errors, such as
    two ranks on one GPU, are mistakes.
    """
    import torch.distributed as dist

    text = str(error).lower()
    is_of_ranks = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
    return is_of_ranks and any(phrase in text for phrase in LOST)
