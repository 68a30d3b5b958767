"""The simulation: engines that write many turns at once, tools that are waited for, trainers that share a batch.

As in training: one process plays all environments, an episode stays with its engine, batch i is written by the weights
after iteration i − 1 − max_staleness, and a batch is collected whole before it is trained on. Not simulated: replaced
groups, faults and retries, and caches of the engines.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from typing import Any

import simpy

from tasks.learning.shared.dealing import deal
from tasks.planning.simulation.workload import (
    Allocation,
    EngineSpeed,
    EpisodeTurns,
    Speeds,
    Workload,
    costs_of_group,
)

WARM_UP, COUNTED = 2, 4  # iterations
Waits = Generator[simpy.Event, Any, None]
Batch = list[list[EpisodeTurns]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the counted iterations: seconds of one, its rollouts and its update; the share of that time in which
    trainers, engines and the process that plays the environments had nothing to do.
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
    warm_up: int = WARM_UP,
    counted: int = COUNTED,
) -> Outcome:
    """The same seed draws the same episodes for every allocation, so that their difference is the allocation's."""
    run = _Run(workload, speeds, allocation, gpus_per_node=gpus_per_node, seed=seed, iterations=warm_up + counted)
    return run.outcome(warm_up)


class _Engine:
    """Every live turn gets a token per step; a turn has ended when the steps have come to its last token."""

    def __init__(self, env: simpy.Environment, speed: EngineSpeed):
        self.env, self.speed = env, speed
        self.episodes = 0
        self.steps = self.reading = self.busy = self.last = 0.0
        self.live: list[tuple[float, int, simpy.Event]] = []
        self.numbers = count()
        self.plan = 0  # the last that was made; older ones are void

    def write(self, fed: int, sampled: int) -> simpy.Event:
        self.advance()
        done = self.env.event()
        heapq.heappush(self.live, (self.steps + sampled, next(self.numbers), done))
        self.reading += fed * self.speed.fed_token
        self._plan_next_end()
        return done

    def advance(self) -> None:
        elapsed, self.last = self.env.now - self.last, self.env.now
        if not self.live:
            return
        self.busy += elapsed
        read = min(elapsed, self.reading)
        self.reading -= read
        self.steps += (elapsed - read) / self.speed.decode.step_seconds(len(self.live))

    def _plan_next_end(self) -> None:
        self.plan += 1
        if not self.live:
            return
        left = max(0.0, self.live[0][0] - self.steps)
        timeout = self.env.timeout(
            self.reading + left * self.speed.decode.step_seconds(len(self.live)), value=self.plan
        )
        assert timeout.callbacks is not None
        timeout.callbacks.append(self._end_turns)

    def _end_turns(self, timeout: simpy.Event) -> None:
        if timeout.value != self.plan:
            return
        self.advance()
        self.steps = max(self.steps, self.live[0][0])
        while self.live and self.live[0][0] <= self.steps + 1e-9:
            heapq.heappop(self.live)[2].succeed()
        self._plan_next_end()


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
        self.engines = [_Engine(self.env, speeds.engine) for _ in range(allocation.engines)]
        self.places = simpy.Resource(self.env, workload.max_concurrent_episodes)
        self.trained = [self.env.event() for _ in range(iterations + 1)]  # version i is there
        self.trained[0].succeed()
        self.batches: list[simpy.Event] = [self.env.event() for _ in range(iterations + 1)]
        self.host_until = self.host_busy = self.trainer_busy = 0.0
        self.ends = [(0.0, 0.0, 0.0, 0.0)]  # of iterations: the time, and what was busy until then
        self.rollouts: list[float] = []
        self.updates: list[float] = []
        self.env.process(self._collect())
        self.env.process(self._train())
        self.env.run()

    def outcome(self, warm_up: int) -> Outcome:
        (start, *before), (end, *after) = self.ends[warm_up], self.ends[-1]
        counted = len(self.ends) - 1 - warm_up
        trainer, engine, host = (late - early for early, late in zip(before, after, strict=True))
        seconds = (end - start) / counted
        return Outcome(
            iteration_seconds=seconds,
            rollout_seconds=sum(self.rollouts[warm_up:]) / counted,
            update_seconds=sum(self.updates[warm_up:]) / counted,
            trainer_idle=1 - trainer / (end - start),
            engine_idle=1 - engine / (end - start),
            host_idle=1 - host / (end - start),
            episodes_per_hour=3600 * self.workload.episodes / seconds,
        )

    def _collect(self) -> Waits:
        served = None
        for iteration in range(1, self.iterations + 1):
            batch = self._draw()
            version = max(0, iteration - 1 - self.workload.max_staleness)
            yield self.trained[version]
            if version != served:
                yield self.env.timeout(self.speeds.refresh)
                served = version
            since = self.env.now
            yield self.env.all_of([self.env.process(self._play(episode)) for group in batch for episode in group])
            self.rollouts.append(self.env.now - since)
            self.batches[iteration].succeed(batch)

    def _draw(self) -> Batch:
        """Whole groups with replacement, and from each as many episodes as a group has."""
        groups = self.rng.choices(self.workload.groups, k=self.workload.problems)
        return [self.rng.choices(group, k=self.workload.group_size) for group in groups]

    def _play(self, episode: EpisodeTurns) -> Waits:
        with self.places.request() as place:
            yield place
            engine = min(self.engines, key=lambda engine: engine.episodes)
            engine.episodes += 1
            for turn in episode:
                yield engine.write(turn.fed, turn.sampled)
                if self.speeds.host_turn:
                    yield self._host()
                if turn.tool_seconds:
                    yield self.env.timeout(turn.tool_seconds)
            engine.episodes -= 1

    def _host(self) -> simpy.Event:
        """Turns are read and answered one after another."""
        self.host_until = max(self.host_until, self.env.now) + self.speeds.host_turn
        self.host_busy += self.speeds.host_turn
        return self.env.timeout(self.host_until - self.env.now)

    def _train(self) -> Waits:
        for iteration in range(1, self.iterations + 1):
            batch = yield self.batches[iteration]
            longest, mean = update_seconds(batch, self.workload, self.speeds, self.allocation, self.gpus_per_node)
            yield self.env.timeout(longest)
            if self.workload.max_staleness:  # the next batch is begun before a checkpoint is written
                self.trained[iteration].succeed()
            yield self.env.timeout(self.speeds.save)
            if not self.workload.max_staleness:
                self.trained[iteration].succeed()
            self.updates.append(longest)
            self.trainer_busy += mean + self.speeds.save
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
