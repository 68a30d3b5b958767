"""The race: find the best snapshot on `select` without playing every snapshot on every problem.

All snapshots play the same growing blocks of problems in one random order, with the same random numbers. After each
round two rules drop snapshots:

    worse       the leader is better by a one-sided paired sign-flip test over split groups. `error_rate` is divided by
                the number of snapshots the best could lose to and of looks (Bonferroni), so it bounds the chance that
                the truly best snapshot is ever dropped as worse.
    no place    at most `max_finalists` enter the last round, twice as many the one before, and so on, the leaders
                first. So cost does not grow with the number of snapshots where all are alike. No error rate bounds
                this rule; `chance_of_losing_its_place` simulates it.

A round doubles the problems played, so engines change models only a few times. The winner has played all of `select`.
An episode that the environment lost counts as failed here, so every snapshot is ranked on the same problems and none
gains by the calls that a tool does not survive. The best of many looks better than it is, so only
`test` measures it. Source: F-Race, Birattari et al. 2002; sequential halving, Karnin et al. 2013.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tasks.core.files import natural_order
from tasks.core.records import Problem
from tasks.measurement.statistics import Success, paired_steps, sums_by_group
from tasks.stages.evaluate.settings import RacingSettings


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    num_rounds: int
    snapshots: list[str]
    problems: list[Problem]


@dataclass(slots=True)
class Race:
    """The rounds, which snapshots were dropped when and why (both JSON), and the winner."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)
    winner: str = ""


Play = Callable[[Round], Mapping[str, Success]]
NUM_SIMULATIONS, SIMULATION_SEED = 4_000, 0


def race(
    snapshots: Sequence[str], problems: Sequence[Problem], play: Play, settings: RacingSettings | None, *, seed: int
) -> Race:
    """Play rounds until all of `select` is played; the best success wins, of equals the earliest.

    `play` returns each snapshot's success on the problems of that round only. Without settings there is one round of
    all.
    """
    outcome, running = Race(), sorted(snapshots, key=natural_order)
    success: dict[str, Success] = {name: {} for name in running}
    ends = block_ends(len(problems), settings)
    ordered = _shuffle(problems, seed) if settings else list(problems)
    groups = {problem.id: problem.split_group for problem in problems}
    met = 0
    for number, end in enumerate(ends, start=1):
        end = end if len(running) > 1 else len(problems)  # alone: the rest of its episodes are still needed
        played = play(Round(number, len(ends), running, ordered[met:end]))
        met = end
        for name in running:
            success[name] |= played[name]
        leader = max(running, key=lambda name: _mean(success[name]))
        outcome.rounds.append({"num_problems": met, "snapshots": running, "leader": leader})
        if met == len(problems):
            outcome.winner = leader
            break
        assert settings is not None
        level = settings.error_rate / ((len(snapshots) - 1) * (len(ends) - 1))
        places = num_places(settings, number=number, num_rounds=len(ends))
        dropped = _find_dropped(leader, {name: success[name] for name in running}, groups, level=level, places=places)
        outcome.dropped |= {name: {**why, "round": number, "num_problems": met} for name, why in dropped.items()}
        running = [name for name in running if name not in dropped]
    return outcome


def block_ends(num_problems: int, settings: RacingSettings | None) -> list[int]:
    """Problems played after each round, doubling: 550 in 4 rounds are 69, 138, 275, 550. A round that would decide on
    fewer than `min_problems` is merged with the next.
    """
    if settings is None:
        return [num_problems]
    ends = {-(-num_problems // 2**left) for left in range(settings.num_rounds)}
    return sorted(end for end in ends if end >= min(settings.min_problems, num_problems))


def num_places(settings: RacingSettings, *, number: int, num_rounds: int) -> int | None:
    """How many snapshots may play on after round `number`; None is all."""
    return settings.max_finalists and settings.max_finalists * 2 ** (num_rounds - number - 1)


def chance_of_losing_its_place(
    settings: RacingSettings, *, lead: float, num_snapshots: int, num_problems: int, samples: int, success_rate: float
) -> float:
    """Chance that the truly best snapshot, ahead of all others by `lead`, is dropped as "no place".

    Simulated with equal others and normal noise, independent between problems, with the variance of `power.py`. The
    standard error is at most 0.8 points.
    """
    import numpy as np

    from tasks.measurement.power import SHARE_BETWEEN_PROBLEMS, SHARED_DIFFICULTY

    rng, ends = np.random.default_rng(SIMULATION_SEED), block_ends(num_problems, settings)
    own = SHARE_BETWEEN_PROBLEMS * (1 - SHARED_DIFFICULTY) + (1 - SHARE_BETWEEN_PROBLEMS) / samples
    spread = success_rate * (1 - success_rate) * own  # of one problem; what all snapshots share moves no rank
    scores = np.zeros((NUM_SIMULATIONS, num_snapshots))
    is_running = np.ones((NUM_SIMULATIONS, num_snapshots), dtype=bool)
    met = 0
    for number, end in enumerate(ends[:-1], start=1):
        scores += np.sqrt(spread * (end - met)) * rng.standard_normal(scores.shape)
        scores[:, 0] += lead * (end - met)
        met = end
        places = num_places(settings, number=number, num_rounds=len(ends))
        if places is not None and places < num_snapshots:
            ranked = np.where(is_running, scores, -np.inf)
            last = -np.partition(-ranked, places - 1, axis=1)[:, places - 1]
            is_running &= ranked >= last[:, None]
    return float(1 - is_running[:, 0].mean())


def _find_dropped(
    leader: str, success: Mapping[str, Success], groups: Mapping[str, str], *, level: float, places: int | None
) -> dict[str, dict[str, Any]]:
    """The snapshots that are out after a round, with the reason and how far each is behind the leader."""
    from tasks.measurement.significance import sign_flip_p_values

    behind: dict[str, dict[str, Any]] = {}
    dropped: dict[str, dict[str, Any]] = {}
    for name in success:
        if name != leader:
            steps, unit, labels = paired_steps(success[leader], success[name], groups)
            p_value = sign_flip_p_values(sums_by_group(steps, labels)).greater
            behind[name] = {
                "leader": leader,
                "behind": round(sum(steps) / len(steps) / unit, 6),
                "p_value": float(f"{p_value:.6g}"),
            }
    for name, found in behind.items():
        if found["p_value"] <= level:
            dropped[name] = {"reason": "worse", **found}
    by_rank = sorted((name for name in success if name not in dropped), key=lambda name: -_mean(success[name]))
    for name in by_rank[places:] if places is not None else []:
        dropped[name] = {"reason": "no_place", **behind[name]}
    return dropped


def _mean(success: Success) -> Fraction:
    """Exact mean of the problems' means, so that equal results tie in any order of problems."""
    solved: Counter[int] = Counter()  # by number of samples
    for samples in success.values():
        solved[len(samples)] += sum(samples)
    return sum((Fraction(total, num_samples) for num_samples, total in solved.items()), Fraction(0)) / len(success)


def _shuffle(problems: Sequence[Problem], seed: int) -> list[Problem]:
    from tasks.core.seeds import stream_seed

    return random.Random(stream_seed(seed, "racing")).sample(list(problems), len(problems))
