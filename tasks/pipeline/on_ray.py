"""Ranks and vLLM servers on Ray's cluster (`launch.launcher: ray`): placed together, watched, started again.

Ray places and starts; what happens between the ranks is torch's, as under torchrun. The command that DVC or a person
runs is the driver: it asks for one placement of all, has an actor per rank and per server (`rank_host.py`, the engine's
`on_ray.py`), shows what the ranks print and tells their end in one line. No tensor passes through Ray.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tasks.core.passing_faults import PassingFault
from tasks.core.text import one_line
from tasks.models.settings import ComputeSettings, LaunchSettings
from tasks.pipeline.launch import SUPERVISED
from tasks.pipeline.rank_host import News, RankHost
from tasks.pipeline.ray_cluster import Bundle, Cluster, bundles_of, connected, placed, wait_for_place
from tasks.pipeline.run_lock import FLOW_VARIABLE
from tasks.pipeline.supervise import Ending, run_again
from tasks.rollouts.settings import SERVERS_ON_RAY, OwnEngineSettings

LEASE_SECONDS = 60.0  # after which what runs on a node ends by itself, where this process is gone
RENEW_SECONDS = 5.0
STOP_SECONDS = 15.0
LOOK_SECONDS = 1.0
KILLED = -9


def run_on_ray(
    stage: str, launch: LaunchSettings, compute: ComputeSettings, engine: OwnEngineSettings, options: Sequence[str]
) -> None:
    """Place the ranks of a stage and the engine's servers, and wait for their end; start all ranks again where one has
    died.
    """
    refuse_transfer(engine)
    with connected(launch.ray, asked(launch, compute, engine, gpus=False)) as cluster:
        gpus = compute.device != "cpu" and cluster.has_gpus()
        bundles = asked(launch, compute, engine, gpus=gpus)
        with placed(stage, cluster, launch.ray, bundles, launch.num_trainers) as group:
            placement = Placement(stage, cluster, launch, bundles, group)

            def run() -> list[Ending]:
                try:
                    placement.start_ranks([stage, *options])
                    return watch(placement.ranks, cluster)
                finally:
                    placement.end_ranks()

            with placement.renewed():
                try:
                    placement.start_servers(engine)
                    run_again(stage, launch, run)
                finally:
                    end_all(placement.servers, cluster)


def asked(launch: LaunchSettings, compute: ComputeSettings, engine: OwnEngineSettings, *, gpus: bool) -> list[Bundle]:
    return bundles_of(
        launch.num_trainers,
        compute.num_threads,
        gpus=gpus,
        num_servers=engine.num_own_servers,
        per_server=getattr(engine, "tensor_parallel_size", 1),
    )


def refuse_transfer(engine: OwnEngineSettings) -> None:
    """ValueError where weights would go from GPU to GPU of nodes that do not know of each other."""
    transfer = getattr(engine, "transfer", "disk")
    if engine.num_own_servers and transfer != "disk":
        raise ValueError(
            f"launch.launcher is ray and engine.settings.transfer {transfer}, which servers on Ray's nodes do not "
            f"take. Set engine.settings.transfer to disk, and engine.settings.folder to one that all nodes share."
        )


def variables_for(launch: LaunchSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Those of `launch.ray.variables`, and by which rank 0 knows the lock of its own flow."""
    patterns = [*launch.ray.variables, FLOW_VARIABLE]
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


class Placement:
    """Where the ranks are, and after them the servers; `ranks` and `servers` are the hosts that live."""

    def __init__(self, stage: str, cluster: Cluster, launch: LaunchSettings, bundles: list[Bundle], group: Any):
        self.stage, self.cluster, self.launch, self.bundles, self.group = stage, cluster, launch, bundles, group
        self.ranks: list[Any] = []
        self.servers: list[Any] = []

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """All hosts know that this process lives, also while it waits for a place or for ranks to start."""
        ended = threading.Event()
        thread = threading.Thread(target=self._renew, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(RENEW_SECONDS)

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_SECONDS):
            for host in [*self.ranks, *self.servers]:
                with suppress(Exception):
                    host.renew.remote()

    def start_servers(self, engine: OwnEngineSettings) -> None:
        """Hosts, by names that rank 0 knows. Ray starts one again that dies."""
        if not engine.num_own_servers:
            return
        from tasks.engines.vllm.on_ray import ServerHost

        again = {"max_restarts": getattr(engine, "max_restarts", 0), "max_concurrency": 10_000}
        self.servers = [
            self._actor(ServerHost, self.launch.num_trainers + number, name=f"server-{number + 1}", **again)
            for number in range(engine.num_own_servers)
        ]

    def start_ranks(self, arguments: Sequence[str]) -> None:
        """Each with the command as its child; rank 0's node is where they meet."""
        import ray

        launch, cluster = self.launch, self.cluster
        wait_for_place(self.stage, cluster, launch.ray, self.bundles, launch.num_trainers, self.group)
        self.ranks = hosts = [self._actor(RankHost, rank, max_concurrency=4) for rank in range(launch.num_trainers)]
        try:
            places = ray.get([host.meeting_place.remote() for host in hosts], timeout=launch.ray.place_seconds)
            meeting = {
                SUPERVISED: cluster.namespace,
                "WORLD_SIZE": str(len(hosts)),
                "MASTER_ADDR": places[0][1],
                "MASTER_PORT": str(places[0][2]),
                "LOCAL_RANK": "0",  # Ray shows each its own GPU
                "LOCAL_WORLD_SIZE": "1",
            }
            if self.servers:
                meeting[SERVERS_ON_RAY] = f"{cluster.address} {cluster.namespace}"
            given = variables_for(launch, os.environ) | meeting
            starts = [host.start.remote(n, arguments, {**given, "RANK": str(n)}) for n, host in enumerate(hosts)]
            ray.get(starts, timeout=launch.ray.place_seconds)
        except Exception as error:
            cluster.refuse_lost_head()
            raise PassingFault(
                f"{self.stage}: Ray placed {len(hosts)} ranks and did not start them ({told_of_ray(error)}), so "
                f"nothing was trained. Every node needs {Path.cwd()} on storage that all share, and the same "
                f"lock; Ray's own logs are in its session's folder on the node."
            ) from None

    def end_ranks(self) -> None:
        hosts, self.ranks = self.ranks, []
        end_all(hosts, self.cluster)

    def _actor(self, host: type, bundle: int, **options: Any) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self.bundles[bundle]
        placed_there = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return (
            ray.remote(host)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0.0),
                scheduling_strategy=placed_there,
                **options,
            )
            .remote(str(Path.cwd()), LEASE_SECONDS)
        )


def watch(ranks: Sequence[Any], cluster: Cluster) -> list[Ending]:
    """Show what ranks print until all have ended well, or one has not: how those ended that did not, after a last look
    at all. PassingFault where the head is gone.
    """
    import ray

    looks: dict[Any, int] = {host.look.remote(): rank for rank, host in enumerate(ranks)}
    ended: dict[int, Ending] = {}
    last_look = float("inf")
    while looks and time.monotonic() < last_look:
        ready, _ = ray.wait(list(looks), num_returns=1, timeout=LOOK_SECONDS)
        for look in ready:
            rank = looks.pop(look)
            news = _news_of(rank, look)
            _show(news)
            if news.ending is None:
                looks[ranks[rank].look.remote()] = rank
                continue
            ended[rank] = news.ending
            if news.ending.status:
                last_look = min(last_look, time.monotonic() + LOOK_SECONDS)
        cluster.refuse_lost_head()
    return [ending for ending in ended.values() if ending.status]


def _news_of(rank: int, look: Any) -> News:
    """Of an actor that Ray lost, an end as by a signal: nothing says that it would happen again."""
    import ray

    try:
        return ray.get(look)
    except ray.exceptions.RayError as error:
        return News(b"", b"", Ending(rank, KILLED, told_of_ray(error)))


def told_of_ray(error: Exception) -> str:
    return one_line(f"{type(error).__name__} of Ray: {error}", limit=240)


def _show(news: News) -> None:
    for stream, written in ((sys.stdout, news.output), (sys.stderr, news.errors)):
        if written:
            stream.flush()
            stream.buffer.write(written)  # a piece may end within a character
            stream.flush()


def end_all(hosts: Sequence[Any], cluster: Cluster) -> None:
    """What they started, and they themselves; those that do not answer end with their lease, as all do without a head,
    for which `ray.kill` would wait.
    """
    import ray

    stops: list[Any] = []
    for host in hosts:
        with suppress(Exception):
            stops.append(host.stop.remote())
    with suppress(Exception):
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_SECONDS)
    for host in [] if cluster.is_lost else hosts:
        with suppress(Exception):
            ray.kill(host)
