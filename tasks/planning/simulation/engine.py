"""A simulated engine: it writes many turns at once, and stalls to read what is new."""

from __future__ import annotations

import heapq
import math
from itertools import count

import simpy

from tasks.planning.simulation.workload import EngineSpeed

ROUNDING = 1e-9  # of a step


class Engine:
    """Every live turn gets a token per step; a turn has ended when the steps have come to its last token. A turn that
    begins within a step waits for the next. `slowness` is what a second of its work takes.
    """

    def __init__(self, env: simpy.Environment, speed: EngineSpeed, number: int):
        self.env, self.speed, self.number, self.slowness = env, speed, number, 1.0
        self.episodes = self.held = 0  # its episodes, and their tokens
        self.steps = self.stalled = self.busy = self.last = 0.0
        self.is_reading = False  # since its last step
        self.live: list[tuple[float, int, simpy.Event]] = []
        self.numbers = count()
        self.plan = 0  # the last that was made; older ones are void

    def write(self, fed: int, sampled: int) -> simpy.Event:
        self.advance()
        done = self.env.event()
        heapq.heappush(self.live, (math.ceil(self.steps - ROUNDING) + sampled, next(self.numbers), done))
        self.stalled += fed * self.speed.fed_token + self.speed.turn + (0.0 if self.is_reading else self.speed.read)
        self.is_reading = True
        self._plan_next_end()
        return done

    def stall(self, seconds: float) -> None:
        self.advance()
        self.stalled += seconds
        self._plan_next_end()

    def set_slowness(self, slowness: float) -> None:
        self.advance()
        self.slowness = slowness
        self._plan_next_end()

    def advance(self) -> None:
        elapsed, self.last = self.env.now - self.last, self.env.now
        worked = elapsed / self.slowness
        stalled = min(worked, self.stalled)
        self.stalled -= stalled
        if not self.live:
            return
        self.busy += elapsed
        if worked > stalled:
            self.steps += (worked - stalled) / self.speed.decode.step_seconds(len(self.live))
            self.is_reading = False

    def _plan_next_end(self) -> None:
        self.plan += 1
        if not self.live:
            return
        left = max(0.0, self.live[0][0] - self.steps)
        work = self.stalled + left * self.speed.decode.step_seconds(len(self.live))
        timeout = self.env.timeout(work * self.slowness, value=self.plan)
        assert timeout.callbacks is not None
        timeout.callbacks.append(self._end_turns)

    def _end_turns(self, timeout: simpy.Event) -> None:
        if timeout.value != self.plan:
            return
        self.advance()
        self.steps = max(self.steps, self.live[0][0])
        self.is_reading = False
        while self.live and self.live[0][0] <= self.steps + ROUNDING:
            heapq.heappop(self.live)[2].succeed()
        self._plan_next_end()
