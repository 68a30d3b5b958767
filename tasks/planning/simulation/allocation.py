"""How to split N GPUs into trainers and engines, and where the next GPU goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tasks.planning.simulation.cluster import Outcome
from tasks.planning.simulation.workload import Allocation

SMALLEST, LARGEST = 8, 1024
LEAST_GAIN = 0.005  # of an iteration's seconds; less is no gain
NOWHERE, TO_TRAINERS, TO_ENGINES = "nowhere", "trainers", "engines"


@dataclass(frozen=True, slots=True)
class Row:
    """The best of the allocations that were looked at for `gpus`; it may leave some of them without work."""

    gpus: int
    allocation: Allocation
    outcome: Outcome

    @property
    def unused(self) -> int:
        return self.gpus - self.allocation.gpus


@dataclass(frozen=True, slots=True)
class Next:
    """Where the next GPU goes, and the share of an iteration's seconds that it saves. Where an engine has several GPUs
    the next engine is meant.
    """

    where: str
    gain: float
    outcome: Outcome


@dataclass
class Search:
    """Simulates each allocation once. `engine_size` GPUs to an engine; no more than `most_trainers` have work."""

    simulate: Callable[[Allocation], Outcome]
    engine_size: int
    most_trainers: int
    known: dict[Allocation, Outcome] = field(default_factory=dict)

    def outcome(self, allocation: Allocation) -> Outcome:
        if allocation not in self.known:
            self.known[allocation] = self.simulate(allocation)
        return self.known[allocation]

    def best(self, gpus: int, before: Allocation | None = None) -> Row:
        """Halving steps over the number of trainers, from an even split; never slower than `before`, which may be that
        of fewer GPUs.
        """
        most = max(1, min(self.most_trainers, gpus - self.engine_size))
        best, step = max(1, min(most, gpus // 2)), max(1, most // 2)
        while step:
            near = [best, *(one for one in (best - step, best + step) if 1 <= one <= most)]
            found = min(near, key=lambda trainers: self._seconds(self._split(gpus, trainers)))
            step = step if found != best else step // 2
            best = found
        candidates = [self._split(gpus, best), *([before] if before else [])]
        chosen = min(candidates, key=self._seconds)
        return Row(gpus, chosen, self.outcome(chosen))

    def next_gpu(self, row: Row) -> Next:
        """One trainer more, one engine more, or nothing."""
        more = {
            TO_TRAINERS: replace(row.allocation, trainers=row.allocation.trainers + 1),
            TO_ENGINES: replace(row.allocation, engines=row.allocation.engines + 1),
        }
        now = self._seconds(row.allocation)
        where = min(more, key=lambda name: self._seconds(more[name]))
        gain = 1 - self._seconds(more[where]) / now
        if gain < LEAST_GAIN:
            return Next(NOWHERE, 0.0, row.outcome)
        return Next(where, gain, self.outcome(more[where]))

    def rows(self, sizes: list[int]) -> Iterator[Row]:
        before = None
        for gpus in sizes:
            row = self.best(gpus, before)
            before = row.allocation
            yield row

    def _split(self, gpus: int, trainers: int) -> Allocation:
        return Allocation(trainers, max(1, (gpus - trainers) // self.engine_size), self.engine_size)

    def _seconds(self, allocation: Allocation) -> float:
        return self.outcome(allocation).iteration_seconds


def sizes_to_plan(gpus: int) -> list[int]:
    """8, 16, … 1,024, and `gpus` itself."""
    doubled = [SMALLEST << number for number in range((LARGEST // SMALLEST).bit_length())]
    return sorted({*doubled, gpus})
