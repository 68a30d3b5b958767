"""How often the rule of places costs a race its best snapshot: the part of racing's error that no test bounds.

Evidence drops the truly best snapshot at most at `evaluate.racing.error_rate`. Places are few, though, and of snapshots
that are nearly alike the best one has not always led by the end of a round. How often it is dropped so depends on its
lead, the problems, the samples and the places, and is simulated here: normal luck instead of episodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.measurement.power import SHARE_BETWEEN_PROBLEMS, SHARED_DIFFICULTY

NUM_DRAWS, SEED = 4_000, 0


def chance_of_no_place(
    *,
    lead: float,
    num_snapshots: int,
    num_problems: Sequence[int],
    num_places: Sequence[int | None],
    samples_per_problem: int,
    success_rate: float,
) -> float:
    """Chance that the truly best snapshot has no place after some round but the last, 0..1.

    It is better than all others, which are alike, by `lead` (0..1, a difference of success). `num_problems` are those
    met by the end of each round; `num_places` has an entry per round but the last, None where all go on. Luck is
    independent between problems and varies as `power.py` says. The standard error is 0.8 points at most.
    """
    import numpy as np

    rng = np.random.default_rng(SEED)
    own = SHARE_BETWEEN_PROBLEMS * (1 - SHARED_DIFFICULTY) + (1 - SHARE_BETWEEN_PROBLEMS) / samples_per_problem
    spread = success_rate * (1 - success_rate) * own  # of one problem; what all snapshots share moves no rank
    scores, is_running = np.zeros((NUM_DRAWS, num_snapshots)), np.ones((NUM_DRAWS, num_snapshots), dtype=bool)
    met = 0
    for end, places in zip(num_problems, num_places, strict=False):
        scores += np.sqrt(spread * (end - met)) * rng.standard_normal(scores.shape)
        scores[:, 0] += lead * (end - met)
        met = end
        if places is not None and places < num_snapshots:
            ranked = np.where(is_running, scores, -np.inf)
            last = -np.partition(-ranked, places - 1, axis=1)[:, places - 1]
            is_running &= ranked >= last[:, None]
    return float(1 - is_running[:, 0].mean())
