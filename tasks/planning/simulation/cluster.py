"""The simulation: engines that write many turns at once, tools that are waited for, trainers that share a batch.

As in training: one process plays all environments, an episode stays with its engine, batch i is written by the weights
after iteration i − 1 − max_staleness, and a batch is collected whole before it is trained on. Or groups stream: as many
are under way as `groups_under_way`, the trainer takes those that finish first, and turns go on over new weights, which
read their tokens anew. Not simulated: replaced groups, deadlines, faults and retries, and caches of the engines.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Generator
from dataclasses import dataclass
from statistics import mean
from typing import Any

import simpy

from tasks.learning.shared.dealing import deal
from tasks.planning.simulation.engine import ROUNDING, Engine
from tasks.planning.simulation.workload import (
    Allocation,
    EpisodeTurns,
    Speeds,
    Workload,
    costs_of_group,
)

COUNTED = 4  # iterations
Waits = Generator[simpy.Event, Any, None]
Batch = list[list[EpisodeTurns]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the counted iterations: seconds of one, its rollouts (where groups stream, what the trainer waits for
    them) and its update; the share of that time in which trainers, engines and the process that plays the environments
    had nothing to do.
    """

    iteration_seconds: float
    rollout_seconds: float
    update_seconds: float
    trainer_idle: float
    engine_idle: float
    host_idle: float
    episodes_per_hour: float


def simulate(
    workload: Workload,
    speeds: Speeds,
    allocation: Allocation,
    *,
    gpus_per_node: int,
    seed: int,
    counted: int = COUNTED,
) -> Outcome:
    """The same seed draws the same episodes for every allocation, so that their difference is the allocation's.

    Iterations in turn are alike from the first; those ahead, once as many batches are.
    """
    warm_up = 0 if workload.max_staleness == 0 else 1 + workload.max_staleness
    run = _Run(workload, speeds, allocation, gpus_per_node=gpus_per_node, seed=seed, iterations=warm_up + counted)
    return run.outcome(warm_up)


class _Run:
    def __init__(
        self,
        workload: Workload,
        speeds: Speeds,
        allocation: Allocation,
        *,
        gpus_per_node: int,
        seed: int,
        iterations: int,
    ):
        self.workload, self.speeds, self.allocation = workload, speeds, allocation
        self.gpus_per_node, self.iterations, self.rng = gpus_per_node, iterations, random.Random(seed)
        self.env = simpy.Environment()
        self.engines = [Engine(self.env, speeds.engine, number) for number in range(allocation.engines)]
        self.by_episodes = [(0, engine.number) for engine in self.engines]  # a heap
        self.places = simpy.Resource(self.env, workload.max_concurrent_episodes)
        self.trained = [self.env.event() for _ in range(iterations + 1)]  # version i is there
        self.trained[0].succeed()
        last = iterations + workload.max_staleness  # those ahead of the last are begun beside it, as in a longer run
        self.batches: list[simpy.Event] = [self.env.event() for _ in range(last + 1)]
        self.host_until = self.host_busy = self.trainer_busy = 0.0
        self.written = 0.0  # when the write of the last checkpoint ends
        self.is_collecting = self.is_updating = False
        self.beside = self.env.event()  # updating and collecting begin or end to be side by side
        self.ends = [(0.0, 0.0, 0.0, 0.0)]  # of iterations: the time, and what was busy until then
        self.rollouts: list[float] = []
        self.updates: list[float] = []
        self.finished = simpy.Store(self.env)  # groups that stream, each with the event that it was taken
        if workload.groups_under_way is None:
            self.env.process(self._collect())
        else:
            for _ in range(workload.groups_under_way):
                self.env.process(self._stream())
        self.env.run(until=self.env.process(self._train()))

    def outcome(self, warm_up: int) -> Outcome:
        (start, *before), (end, *after) = self.ends[warm_up], self.ends[-1]
        counted = len(self.ends) - 1 - warm_up
        trainer, engine, host = (late - early for early, late in zip(before, after, strict=True))
        seconds = (end - start) / counted
        return Outcome(
            iteration_seconds=seconds,
            rollout_seconds=mean(self.rollouts[warm_up:]),
            update_seconds=sum(self.updates[warm_up:]) / counted,
            trainer_idle=1 - trainer / (end - start),
            engine_idle=1 - engine / (end - start),
            host_idle=1 - host / (end - start),
            episodes_per_hour=3600 * self.workload.episodes / seconds,
        )

    def _collect(self) -> Waits:
        served = None
        for iteration in range(1, len(self.batches)):
            batch = self._draw(self.workload.problems)
            version = max(0, iteration - 1 - self.workload.max_staleness)
            yield self.trained[version]
            if version != served:
                yield self.env.timeout(self.speeds.refresh)
                served = version
            since = self.env.now
            self._note(collecting=True)
            yield self.env.all_of([self.env.process(self._play(episode)) for group in batch for episode in group])
            self._note(collecting=False)
            self.rollouts.append(self.env.now - since)
            self.batches[iteration].succeed(batch)

    def _stream(self) -> Waits:
        """One group after another, each once the trainer took the last."""
        self._note(collecting=True)
        while True:
            (group,) = self._draw(1)
            yield self.env.all_of([self.env.process(self._play(episode)) for episode in group])
            taken = self.env.event()
            yield self.finished.put((group, taken))
            yield taken

    def _take_first(self) -> Generator[simpy.Event, Any, Batch]:
        """The groups of a batch: those that finish first."""
        batch = []
        since = self.env.now
        for _ in range(self.workload.problems):
            group, taken = yield self.finished.get()
            taken.succeed()
            batch.append(group)
        self.rollouts.append(self.env.now - since)
        return batch

    def _renew_weights(self) -> None:
        """While turns are under way: what the engines have of them is read anew."""
        for engine in self.engines:
            engine.stall(self.speeds.refresh + engine.held * self.speeds.engine.fed_token)

    def _draw(self, problems: int) -> Batch:
        """Whole groups with replacement, and from each as many episodes as a group has."""
        groups = self.rng.choices(self.workload.groups, k=problems)
        return [self.rng.choices(group, k=self.workload.group_size) for group in groups]

    def _play(self, episode: EpisodeTurns) -> Waits:
        with self.places.request() as place:
            yield place
            engine = self._begin_episode()
            for turn in episode:
                engine.held += turn.fed + turn.sampled
                yield engine.write(turn.fed, turn.sampled)
                if self.speeds.host_turn:
                    yield self._host(engine)
                if turn.tool_seconds:
                    yield self.env.timeout(turn.tool_seconds)
            engine.episodes -= 1
            heapq.heappush(self.by_episodes, (engine.episodes, engine.number))
            engine.held -= sum(turn.fed + turn.sampled for turn in episode)

    def _begin_episode(self) -> Engine:
        """In the engine with the fewest, the first of several; old entries of `by_episodes` are passed over."""
        while True:
            episodes, number = heapq.heappop(self.by_episodes)
            engine = self.engines[number]
            if engine.episodes == episodes:
                engine.episodes += 1
                heapq.heappush(self.by_episodes, (engine.episodes, number))
                return engine

    def _host(self, engine: Engine) -> simpy.Event:
        """Turns are read and answered one after another."""
        seconds = self.speeds.host_turn * engine.slowness
        self.host_until = max(self.host_until, self.env.now) + seconds
        self.host_busy += seconds
        if engine.speed.in_process:
            engine.stall(self.speeds.host_turn)
        return self.env.timeout(self.host_until - self.env.now)

    def _note(self, *, collecting: bool | None = None, updating: bool | None = None) -> None:
        """One of the two begins or ends; in one process they slow each other while both go on."""
        before = self._slowness
        self.is_collecting = self.is_collecting if collecting is None else collecting
        self.is_updating = self.is_updating if updating is None else updating
        if self._slowness != before:
            for engine in self.engines:
                engine.set_slowness(self._slowness)
            changed, self.beside = self.beside, self.env.event()
            changed.succeed()

    @property
    def _slowness(self) -> float:
        return 1.0 + self.speeds.slowed_beside * (self.is_collecting and self.is_updating)

    def _update(self, seconds: float) -> Waits:
        self._note(updating=True)
        while seconds > ROUNDING:
            since, slowness = self.env.now, self._slowness
            yield self.env.any_of([self.env.timeout(seconds * slowness), self.beside])
            seconds -= (self.env.now - since) / slowness
        self._note(updating=False)

    def _train(self) -> Waits:
        for iteration in range(1, self.iterations + 1):
            streams = self.workload.groups_under_way is not None
            batch = (yield from self._take_first()) if streams else (yield self.batches[iteration])
            longest, average = update_seconds(batch, self.workload, self.speeds, self.allocation, self.gpus_per_node)
            since = self.env.now
            yield from self._update(longest)
            took = self.env.now - since
            if streams:
                self._renew_weights()
            elif self.workload.max_staleness:  # the next batch is begun before a checkpoint is written
                self.trained[iteration].succeed()
            yield self.env.timeout(max(0.0, self.written - self.env.now))
            yield self.env.timeout(self.speeds.save)
            self.written = self.env.now + self.speeds.write
            if not streams and not self.workload.max_staleness:
                self.trained[iteration].succeed()
            self.updates.append(took)
            self.trainer_busy += average + (took - longest) + self.speeds.save
            for engine in self.engines:
                engine.advance()
            engines_busy = sum(engine.busy for engine in self.engines) / len(self.engines)
            self.ends.append((self.env.now, self.trainer_busy, engines_busy, self.host_busy))


def update_seconds(
    batch: Batch, workload: Workload, speeds: Speeds, allocation: Allocation, gpus_per_node: int
) -> tuple[float, float]:
    """Of the trainer with the most to compute, for which the others wait, and their mean."""
    costs = [cost for group in batch for cost in costs_of_group(group, workload)]
    loads = [sum(costs[item] for item in items) for items in deal(costs, allocation.trainers)]
    passes = max(1, math.ceil(max(loads) / workload.micro_batch_tokens))
    shared = speeds.share_weights[allocation.trainers > gpus_per_node] * passes * (1 - 1 / allocation.trainers)
    besides = speeds.update + shared
    return max(loads) * speeds.position + besides, sum(loads) / len(loads) * speeds.position + besides
