"""Rollouts ahead of the trainer: while it trains on one batch, a thread collects the next with its own weights.

Which weights write which batch never depends on timing, so the same seed gives the same run. With `train.max_staleness`
n, version i − 1 − n (the weights after that many iterations) writes batch i, but never a version older than the one
that the run started from or was rolled back to. With n = 1:

    trainer     ·········  batch 1    batch 2    batch 3     versions 1, 2, 3 when done
    collector   batch 1    batch 2    batch 3    batch 4
    written by  0          0          1          2

One thread collects the batches in order, so the curriculum draws batch i after it has learnt from batch i − 1, as it
does without a thread. A checkpoint contains the batches ahead of the trainer, so it needs no old weights. What corrects
for stale batches is `train.importance_correction` (infra/decisions/0013).
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.core.records import Group, Score, Trajectory
from tasks.rollouts.probe import LogProbs

if TYPE_CHECKING:
    from tasks.learning.grpo.trainer import Collect

STOP_SECONDS = 60.0  # how long `close` waits for the turn that the engine writes


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one iteration with replacements, the counts of faults and caches, and the curriculum after it;
    where groups stream and a checkpoint follows, what was `under_way` when it was complete.
    """

    iteration: int
    groups: list[Group]
    counts: dict[str, float]
    curriculum: dict[str, Any]
    under_way: dict[str, Any] | None = None

    def to_row(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Batch:
        return cls(**{**row, "groups": [read_group(group) for group in row["groups"]]})


@dataclass(frozen=True, slots=True)
class Copy:
    """What is trained, at one version, and what the trainer's forward then said of the engine's probe."""

    tensors: dict[str, Tensor]
    probe_logp: LogProbs


@dataclass(frozen=True, slots=True)
class _Request:
    iteration: int
    version: int
    weights: Copy


class Pipeline:
    """Gives the trainer its batches (a `Collect`) and meanwhile collects the next ones.

    `collect` gives a whole batch and `serve` gives the engine other weights, both in the collector's thread; `abandon`
    interrupts `collect` from any thread, and `on_wait` is told the iteration whose batch the trainer waits for. At most
    `max_staleness` copies of the weights exist. The next call of any method but `close` raises the thread's error.
    """

    def __init__(
        self,
        collect: Callable[[int], Batch],
        *,
        serve: Callable[[Copy, int], None],
        abandon: Callable[[], None],
        max_staleness: int,
        num_iterations: int,
        num_threads: int,
        on_wait: Callable[[int], None] = lambda iteration: None,
    ):
        self.collect, self.serve, self.abandon, self.on_wait = collect, serve, abandon, on_wait
        self.max_staleness, self.num_iterations, self.num_threads = max_staleness, num_iterations, num_threads
        self.requests: SimpleQueue[_Request | None] = SimpleQueue()
        self.collected: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self.batch: Batch | None = None  # what the trainer got last
        self.ahead: deque[Batch] = deque()
        self.last_requested = self.num_open = 0
        self.thread = threading.Thread(target=self._work, name="collector", daemon=True)

    def start(self, iteration: int, weights: Callable[[], Copy]) -> None:
        self.last_requested = iteration + len(self.ahead)
        self.publish(iteration, weights)
        self.thread.start()

    def publish(self, version: int, weights: Callable[[], Copy]) -> None:
        """An iteration is done: request the batches that its weights write. `weights` copies them."""
        self._receive_ready()
        last = min(version + 1 + self.max_staleness, self.num_iterations)
        if last == self.last_requested:
            return
        copy = weights()
        for iteration in range(self.last_requested + 1, last + 1):
            self.requests.put(_Request(iteration, version, copy))
        self.num_open += last - self.last_requested
        self.last_requested = last

    def __call__(self, iteration: int, round_number: int, num_problems: int) -> list[Group]:
        """The groups of a round of the iteration."""
        if round_number == 0:
            self._receive_ready()
            self._receive_until(iteration)
            self.batch = self.ahead.popleft()
        assert self.batch is not None and self.batch.iteration == iteration
        return [group for group in self.batch.groups if group.round_number == round_number]

    def batches_ahead(self, version: int) -> list[Batch]:
        """The batches for a checkpoint: written by weights older than `version`, not yet given to the trainer. Waiting
        for them costs nothing, since the trainer needs them next.
        """
        last = min(version + self.max_staleness, self.num_iterations)
        self._receive_until(last)
        return [batch for batch in self.ahead if batch.iteration <= last]

    def discard(self, version: int) -> None:
        """Forget every batch after `version`; waits for the one in progress, since an engine cannot forget a
        half-written turn.
        """
        while not self.requests.empty():
            try:
                self.requests.get_nowait()
                self.num_open -= 1
            except Empty:
                break
        while self.num_open:
            self._receive()
        self.ahead.clear()
        self.last_requested = version

    def close(self) -> None:
        self.abandon()
        self.requests.put(None)
        if self.thread.is_alive():
            self.thread.join(STOP_SECONDS)

    def _receive_until(self, iteration: int) -> None:
        while self.num_open and not (self.ahead and self.ahead[-1].iteration >= iteration):
            self.on_wait(iteration)
            self._receive()

    def _receive_ready(self) -> None:
        """Without waiting: an error is raised now and not when its batch is asked for."""
        while not self.collected.empty():
            self._receive()

    def _receive(self) -> None:
        found = self.collected.get()
        if isinstance(found, BaseException):
            self.collected.put(found)
            raise found
        self.num_open -= 1
        self.ahead.append(found)

    @torch.no_grad()
    def _work(self) -> None:
        """The thread. Gradient mode and the thread count are per thread, so both are set here."""
        torch.set_num_threads(self.num_threads)
        served = None
        try:
            while (request := self.requests.get()) is not None:
                iteration, version = request.iteration, request.version
                if version != served:
                    self.serve(request.weights, version)
                del request  # frees a copy of the weights
                self.collected.put(self.collect(iteration))
                served = version
        except BaseException as error:
            self.collected.put(error)


def refuse_stale(collect: Collect, max_staleness: int | None) -> Collect:
    """`collect` with a ValueError where a turn was written by weights that are too old, or newer than the policy.

    `max_staleness` None accepts every age, for groups that stream: their tokens that are too old carry no loss.
    """
    most = sys.maxsize if max_staleness is None else max_staleness

    def collect_checked(iteration: int, round_number: int, num_problems: int) -> Sequence[Group]:
        groups = collect(iteration, round_number, num_problems)
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            ages = [iteration - 1 - turn.policy_version for turn in trajectory.own_turns]
            if ages and not 0 <= min(ages) <= max(ages) <= most:
                refused = (
                    "no policy has such weights yet" if min(ages) < 0 else f"train.max_staleness is {max_staleness}"
                )
                raise ValueError(
                    f"problem {trajectory.problem_id!r} (draw {trajectory.draw}, sample {trajectory.sample_index}) of "
                    f"iteration {iteration} was written by weights {max(ages)} to {min(ages)} versions old, and "
                    f"{refused}, so its gradient would belong to another policy. This "
                    f"is a fault of the engine's refresh: please report it."
                )
        return groups

    return collect_checked


def measure_staleness(groups: Sequence[Group], iteration: int, oldest: int | None) -> dict[str, float]:
    """Of the sampled tokens, in iterations; where an `oldest` version is given, also the share of tokens of versions
    before it, which carry no loss. Nothing where no token was sampled, as after an outage.
    """
    played = [item for group in groups for item in group.trajectories if item.own_turns or not item.num_replayed_turns]
    written = [(item, sequence) for item in played for sequence in item.sequences]
    ages = [iteration - 1 - version for item, tokens in written for version in item.sampled_versions(tokens)]
    if not ages:
        return {}
    row = {"staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages)}
    if oldest is not None:
        row["stale_token_share"] = sum(age > iteration - 1 - oldest for age in ages) / len(ages)
    return row


def read_group(row: dict[str, Any]) -> Group:
    trajectories = [Trajectory.from_row(item) for item in row["trajectories"]]
    return Group(**{**row, "trajectories": trajectories, "scores": [Score(**score) for score in row["scores"]]})
