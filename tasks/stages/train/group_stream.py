"""Groups as they finish: a fixed number is under way, and a batch takes the first that are complete.

    engine      ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁   always as many groups; new weights while turns are under way
    batch       1        2        3        4      whichever groups finished since the last
    written by  0        0        1        2      the versions of the tokens that were sampled meanwhile

Tokens that are sampled while batch i is collected are of version i − 2 (or the one the run began with or was rolled
back to), as with `train.max_staleness: 1` (`collect_ahead.py`): loaded between two batches, at a point that does not
depend on how fast the trainer is. An episode that takes longer than a batch goes on under the next version, and the
trainer leaves tokens older than `train.max_staleness` without loss (infra/decisions/0070).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from threading import Timer
from typing import Any

from tasks.core.records import Group, Problem, Trajectory
from tasks.learning.grpo.curriculum import ProblemSampler
from tasks.learning.shared.settings import GRPOSettings
from tasks.rewards.settings import RewardSettings
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EpisodeKey
from tasks.rollouts.under_way import discard, restore, suspend
from tasks.stages.train.collect_ahead import Batch, read_group
from tasks.stages.train.groups import score_group

State = dict[str, Any]
BATCHES_AHEAD = 1  # hides the shorter of rollout and update; more would only make tokens older


@dataclass(slots=True)
class OpenGroup:
    """`numbers` are the collector's, of its episodes."""

    problem: Problem
    numbers: list[int]


class GroupStream:
    """A `Collect` in the collector's thread. `ask` is for the trainer's thread: it waits for a batch from now on."""

    def __init__(
        self,
        collector: Collector,
        sampler: ProblemSampler,
        *,
        rewards: RewardSettings,
        explore: Callable[[int], int],
        params: GRPOSettings,
        now: Callable[[], float] = time.monotonic,
    ):
        assert params.streaming is not None
        self.collector, self.sampler, self.rewards = collector, sampler, rewards
        self.explore, self.params, self.settings, self.now = explore, params, params.streaming, now
        self.num_draws = 0
        self.stored: int | None = None  # the iteration whose batch a roll back's checkpoint has
        self.asked: tuple[int, float] | None = None  # the iteration whose batch the trainer waits for, since when
        self._forget()
        collector.begin()

    @classmethod
    def of(
        cls, collector: Collector, sampler: ProblemSampler, params: GRPOSettings, **options: Any
    ) -> GroupStream | None:
        return None if params.streaming is None else cls(collector, sampler, params=params, **options)

    def collect(self, iteration: int, round_number: int, num_problems: int) -> list[Group]:
        """The first `num_problems` groups to finish; fewer where the deadline came and the batch has its least."""
        if round_number == 0:
            self.num_taken = 0
        taken: list[Group] = []
        while len(taken) < num_problems:
            if self.finished:
                taken.append(replace(self.finished.popleft(), round_number=round_number))
                self.num_taken += 1
            elif self._is_cut(iteration):
                break
            else:
                self._begin_groups(iteration, num_problems - len(taken))
                self.collector.step()
                self._gather()
        self.sampler.learn(taken)
        return taken

    def ask(self, iteration: int) -> None:
        """The deadline is counted from the first time."""
        if self.asked is not None and self.asked[0] == iteration:
            return
        self.asked = iteration, self.now()
        if self.settings.batch_deadline_seconds is not None:
            timer = Timer(self.settings.batch_deadline_seconds, self.collector.wake)
            timer.daemon = True
            timer.start()

    def suspend_if_stored(self, iteration: int) -> State | None:
        """With the batch of `iteration`, where the checkpoint after the iteration before it is due."""
        is_due = iteration > 1 and (iteration - 1) % self.params.checkpoint_interval == 0
        return self.suspend() if is_due or iteration == self.stored else None

    def suspend(self) -> State:
        """What `restore` goes on with, as JSON; this one goes on in the same way."""
        return {
            "queue": [[problem.id, draw] for problem, draw in self.queue],
            "open": [[group.problem.id, group.numbers] for group in self.open],
            "finished": [asdict(group) for group in self.finished],
            "episodes": suspend(self.collector),
            "ended": [[number, item.to_row()] for number, item in self.collector.ended.items()],
            "num_added": self.collector.num_added,
        }

    def restore(self, ahead: Sequence[Batch]) -> None:
        """Go on after the last of a checkpoint's batches; where it has none, with nothing under way."""
        if not ahead or ahead[-1].under_way is None:
            return
        state, problems = ahead[-1].under_way, self.sampler.problems
        self.queue.extend((problems[name], draw) for name, draw in state["queue"])
        self.open += [OpenGroup(problems[name], numbers) for name, numbers in state["open"]]
        self.finished.extend(map(read_group, state["finished"]))
        self.collector.ended = {number: Trajectory.from_row(row) for number, row in state["ended"]}
        self.collector.num_added = state["num_added"]
        restore(self.collector, state["episodes"], problems)

    def discard(self, *, stored: int) -> None:
        """Every group under way or finished. No other thread may be in `collect`. A checkpoint with the batch of the
        iteration `stored` follows, whatever the interval.
        """
        discard(self.collector)
        self._forget()
        self.stored = stored

    def close(self) -> None:
        """After the collector was abandoned, or is done."""
        self.collector.close_running()

    def _forget(self) -> None:
        self.queue: deque[tuple[Problem, int]] = deque()  # drawn and not begun, with the number of the draw
        self.open: list[OpenGroup] = []
        self.finished: deque[Group] = deque()
        self.num_taken = 0

    def _is_cut(self, iteration: int) -> bool:
        deadline = self.settings.batch_deadline_seconds
        if deadline is None or self.asked is None or self.asked[0] != iteration:
            return False
        least = math.ceil(self.settings.least_batch_share * self.params.problems_per_iteration)
        return self.num_taken >= least and self.now() - self.asked[1] >= deadline

    def _begin_groups(self, iteration: int, num_missing: int) -> None:
        """As many as are to be under way, but no more than the rest of the run can take."""
        rest = (self.params.num_iterations - iteration) * self.params.problems_per_iteration + num_missing
        group_size = self.explore(iteration)
        while len(self.open) < min(self.settings.groups_under_way, rest):
            problem, draw = self._next_problem(iteration)
            keys = [EpisodeKey(problem, draw, sample) for sample in range(group_size)]
            self.open.append(OpenGroup(problem, list(self.collector.add(keys))))

    def _next_problem(self, iteration: int) -> tuple[Problem, int]:
        """Problems are drawn as many at a time as a batch has; the number of the draw seeds their episodes."""
        if not self.queue:
            self.num_draws += 1
            count = self.params.problems_per_iteration
            drawn = self.sampler.draw(iteration, 0, count, draw_number=self.num_draws)
            self.queue.extend((problem, self.num_draws) for problem in drawn)
        return self.queue.popleft()

    def _gather(self) -> None:
        """Move groups whose last episode ended to the finished ones; those of which nothing is left are gone."""
        ended = self.collector.ended
        for group in [group for group in self.open if all(number in ended for number in group.numbers)]:
            self.open.remove(group)
            played = [ended.pop(number) for number in group.numbers]
            scored = score_group(group.problem, played, self.rewards, 0)
            if scored.trajectories:
                self.finished.append(scored)
