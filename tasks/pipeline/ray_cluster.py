"""Ray's cluster as the launcher uses it: connected to, or started for the length of a command; what a stage asks of it,
and what it has.

What others complain of most is a placement that waits for ever and a death that says nothing: so a placement has a time
limit and is refused with what was asked and what there is, and the head is looked at, since Ray itself waits a minute
for one that is gone.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from tasks.core import guardian
from tasks.core.child_processes import own_guardian
from tasks.core.passing_faults import PassingFault
from tasks.core.terminal import warn
from tasks.core.text import one_line
from tasks.models.settings import RaySettings

REACH_SECONDS = 5.0
LOOK_AT_HEAD_SECONDS = 2.0
LOOKS = 3  # that the head does not answer, one after another, before it counts as gone
CONNECT_SECONDS = 60.0  # in which a cluster takes a driver, on a busy machine too
END_SECONDS = 10.0
LONGEST_BASE = 30  # bytes of a socket's 107, of which Ray's own part takes 77: /ray-…/session_…/sockets/plasma_store
CONNECT = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)"
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
USED = ("CPU", "GPU")
Bundle = dict[str, float]


def bundles_of(num_trainers: int, num_threads: int, *, gpus: bool, num_servers: int, per_server: int) -> list[Bundle]:
    """What each rank asks for, and then each vLLM server: processors, and on GPUs one per rank and `per_server`."""
    trainer = {"CPU": float(num_threads)} | ({"GPU": 1.0} if gpus else {})
    server = {"CPU": 1.0} | ({"GPU": float(per_server)} if gpus else {})
    return [trainer] * num_trainers + [server] * num_servers


def fits(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> bool:
    """Whether nodes with these resources, all free, have room for the bundles, the largest first."""
    left = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda bundle: [bundle.get(name, 0.0) for name in reversed(USED)], reverse=True):
        room = [node for node in left if all(node.get(name, 0.0) >= amount for name, amount in bundle.items())]
        if not room:
            return False
        best = min(room, key=lambda node: [node.get(name, 0.0) for name in reversed(USED)])
        for name, amount in bundle.items():
            best[name] -= amount
    return True


def told_resources(resources: Mapping[str, float]) -> str:
    """Such as `2 CPU + 1 GPU`."""
    return " + ".join(f"{resources[name]:g} {name}" for name in USED if resources.get(name)) or "nothing"


def told_bundles(bundles: Sequence[Bundle], num_trainers: int) -> str:
    parts = [(bundles[:num_trainers], "trainer"), (bundles[num_trainers:], "vLLM server")]
    return " and ".join(
        f"{len(part)} {name}{'s' if len(part) > 1 else ''} of {told_resources(part[0])}" for part, name in parts if part
    )


@dataclass
class Cluster:
    """A cluster that this process is connected to; `address` is that of its head."""

    address: str
    namespace: str
    unanswered: int = field(default=0, init=False)
    looked: float = field(default=0.0, init=False)

    @property
    def is_lost(self) -> bool:
        """Without a head, what asks it something waits a minute and then ends this process."""
        return self.unanswered >= LOOKS

    def nodes(self) -> dict[str, Bundle]:
        import ray

        return {
            f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})": {
                name: node["Resources"].get(name, 0.0) for name in USED
            }
            for node in ray.nodes()
            if node["Alive"]
        }

    def has_gpus(self) -> bool:
        return any(node["GPU"] for node in self.nodes().values())

    def describe(self) -> str:
        import ray

        nodes, free = self.nodes(), ray.available_resources()
        told = ", ".join(f"{name} has {told_resources(node)}" for name, node in nodes.items())
        return f"of its {len(nodes)} node{'s' if len(nodes) > 1 else ''} {told}; {told_resources(free)} free in all"

    def refuse_lost_head(self) -> None:
        """PassingFault where it has not answered several times."""
        if time.monotonic() - self.looked < LOOK_AT_HEAD_SECONDS:
            return
        self.unanswered = 0 if reaches(self.address) else self.unanswered + 1
        self.looked = time.monotonic()
        if self.is_lost:
            raise PassingFault(
                f"the head of Ray's cluster at {self.address} is gone, and nothing can be placed without it, so all "
                f"ranks and servers were ended. What was finished is in the last checkpoint: start a cluster (or set "
                f"launch.ray.address to null), then run the same command again to go on from it."
            )


def reaches(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), REACH_SECONDS):
        return True
    return False


@contextmanager
def connected(settings: RaySettings, bundles: Sequence[Bundle]) -> Iterator[Cluster]:
    """A cluster of this machine's has room for `bundles` of processors, which they share."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    namespace, folder = f"turnwise-{secrets.token_hex(8)}", None
    if settings.address is None:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))  # else one is left in the home
        folder = make_session_folder()
    refuse_without_ray()
    import ray

    quiet = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        if folder is None:
            _connect(settings, quiet)
        else:
            own_guardian().watch_descendants()
            own_guardian().remove(folder)
            cpus = max(os.cpu_count() or 1, math.ceil(sum(bundle["CPU"] for bundle in bundles)))
            ray.init("local", num_cpus=cpus, include_dashboard=False, _temp_dir=str(folder), **quiet)
        signal.signal(signal.SIGTERM, on_terminate)  # Ray's handler ends with status 15
        yield Cluster(ray.get_runtime_context().gcs_address, namespace)
    finally:
        family = psutil.Process().children(recursive=True)
        ray.shutdown()
        if folder is not None:
            _end(family)
            shutil.rmtree(folder, ignore_errors=True)


def make_session_folder() -> Path:
    """An empty folder for a session of Ray, with sockets that nobody else can reach: in TMPDIR, or in /tmp where that
    is too long a path for sockets.
    """
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp" if len(os.fsencode(base)) > LONGEST_BASE else base))


def _end(family: Sequence[psutil.Process]) -> None:
    """What is left of a cluster, such as daemons that wait for a head that is gone. Guardians end by themselves."""
    left = [process for process in family if not _is_guardian(process)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=END_SECONDS)


def _is_guardian(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return guardian.__file__ in process.cmdline()
    return False


def refuse_without_ray() -> None:
    """ValueError where it is not installed."""
    if find_spec("ray") is None:
        raise ValueError(
            "launch.launcher is ray, and Ray is not installed, so nothing can be placed. Run `make setup-ray`, or set "
            "launch.launcher to torchrun."
        )


def _connect(settings: RaySettings, quiet: Mapping[str, Any]) -> None:
    import ray

    address = settings.address
    assert address is not None
    if address != "auto" and not reaches(address):
        raise PassingFault(
            f"launch.ray.address is {address}, where nothing answers, so nothing could be placed. Start the cluster "
            f"(`ray start --head`), correct the address, or set it to null for a cluster of this machine."
        )
    _try_connection(address)
    ray.init(address, **quiet)
    if not _has_token():
        warn(
            f"warning: Ray's cluster at {address} asks for no token, so whoever reaches its ports can run programs on "
            f"its nodes. Start it with RAY_AUTH_MODE=token and one token on every node (`ray get-auth-token`)."
        )


def _try_connection(address: str) -> None:
    """ValueError where a driver does not connect, first of all in a process of its own: where no head of Ray answers,
    and where its token is another, `ray.init` tries again for minutes or ends the process.
    """
    try:
        tried = subprocess.run(
            [sys.executable, "-c", CONNECT, address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=CONNECT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        told, why = error.stderr or b"", f"no answer of Ray's within {CONNECT_SECONDS:g} s"
    else:
        if tried.returncode == 0:
            return
        told = tried.stderr
        why = one_line(told.decode("utf-8", "replace").strip().rpartition("\n")[2], limit=200)
    if b"InvalidAuthToken" in told:
        why = "its token is another than this process has (RAY_AUTH_TOKEN, or ~/.ray/auth_token)"
    raise ValueError(
        f"launch.ray.address is {address}, and there is no connecting to a cluster of Ray there ({why}), so nothing "
        f"could be placed. Run the command on a node of the cluster, with its token and the same lock."
    )


def _has_token() -> bool:
    """As Ray finds one; without, it connects to open clusters only."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return False
    return any(os.environ.get(name) for name in TOKENS) or (Path.home() / ".ray" / "auth_token").exists()


@contextmanager
def placed(stage: str, cluster: Cluster, settings: RaySettings, bundles: list[Bundle], num: int) -> Iterator[Any]:
    """Ray's placement group of the bundles, of which the first `num` are trainers, for as long as the block lasts."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(bundles, strategy="PACK")
    try:
        wait_for_place(stage, cluster, settings, bundles, num, group)
        yield group
    finally:
        if not cluster.is_lost:
            remove_placement_group(group)


def wait_for_place(
    stage: str, cluster: Cluster, settings: RaySettings, bundles: list[Bundle], num: int, group: Any
) -> None:
    """One line in time where the cluster has no room: ValueError where it never will, else PassingFault."""
    deadline = time.monotonic() + settings.place_seconds
    while (left := deadline - time.monotonic()) > 0:
        cluster.refuse_lost_head()
        if group.wait(min(left, LOOK_AT_HEAD_SECONDS)):
            return
    is_large_enough = fits(bundles, list(cluster.nodes().values()))
    kind = PassingFault if is_large_enough else ValueError
    raise kind(
        f"{stage} asks Ray's cluster at {cluster.address} for {told_bundles(bundles, num)}, and {cluster.describe()}, "
        f"so it was not placed within {settings.place_seconds:g} s (launch.ray.place_seconds). "
        + (
            "Others hold what it needs: see `ray status`, and run again when they have ended."
            if is_large_enough
            else "Add nodes, or lower launch.num_trainers, compute.num_threads or engine.settings.num_servers."
        )
    )
