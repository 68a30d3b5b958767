"""A year of the deployments: a drift check every day, and a night's run where there is a reason for one.

Problems and recipe change now and then. Where something changed, the night trains a challenger, promotion decides with
what the year's error budget leaves, and a test set that was looked at too often is replaced by the next one, on which
the same challenger is decided the night after. The world may change once where no probe looks: every policy loses so
much. Whether to run (`find_changes`, `find_fall`), whether the champion fell (`champion_check.py`), what a decision may
spend, whether a challenger passes and how worn a test set is are the product's own functions.

A change that makes models worse is taken back after its night; one that makes them better stays, so a challenger held
for want of evidence comes again with the next change. Champion and challengers are measured on problems of their own
split groups: of `select` every day, of the test set in a decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import expit

from tasks.core.settings import Paths
from tasks.measurement.statistics import summarise
from tasks.pipeline.champion_check import (
    DriftCheckSettings,
    check_error,
    choose_problems,
    confidence_of,
    has_fallen,
)
from tasks.pipeline.reasons import find_changes, find_fall
from tasks.stages.promote.error_budget import Spending, error_budget
from tasks.stages.promote.settings import ErrorBudgetSettings
from tasks.tracking.finished_runs import FinishedRun
from tasks.tracking.holdout_reuse import HoldoutHistory, HoldoutSet
from tasks.tracking.journal import Entry
from tests.benchmarks.demo import demo_params
from tests.simulations.episodes import episodes
from tests.simulations.policies import Floats, as_success
from tests.simulations.rates import Rate
from tests.simulations.year import DEMO, SAMPLES, Counts, Year, is_better

NUM_DAYS = 365
START = datetime(2026, 1, 1, 3, tzinfo=UTC)
WORLD, GROUPS = DEMO, DEMO.groups()
PROBLEMS = list(GROUPS)
NEW_DATA, NEW_RECIPE = 1 / 7, 1 / 14  # chance of a day
GAINS, CHANCES = (0.03, 0.0, -0.01), (0.1, 0.45, 0.45)  # of a change, in success
FIRST, CEILING = 0.8, 0.98
RECOVERED = 0.8  # of a fall, by a model trained after it
PATHS = Paths("artifacts")
SCREEN = Year((0.0,), (1.0,), None, (0.0,), is_better)  # its screen of nights that cannot pass


@dataclass(frozen=True)
class Model:
    """A policy: its true success, what it makes of the groups of select, and its episodes on the present test set."""

    level: float
    on_select: Floats
    on_test: Counts


@dataclass
class Totals:
    """What happened in a year. `missed` is the mean over its days of the success in reach and not in production,
    `left` that of its last day.
    """

    runs: int = 0
    runs_for_nothing: int = 0
    promotions: int = 0
    no_better: int = 0
    renewals: int = 0
    false_alarms: int = 0
    improvements: int = 0
    left: float = 0.0
    found_after: int | None = None  # days from the fall to the check that finds it
    replaced_after: int | None = None
    missed: float = 0.0


@dataclass
class Deployments:
    """One year; `fall` is what every policy loses on the day `falls_on`, which no probe sees."""

    rng: np.random.Generator
    fall: float = 0.0
    falls_on: int | None = None
    planned: int | None = None  # decisions_per_year, where it is not the one of params.yaml
    num_days: int = NUM_DAYS
    totals: Totals = field(default_factory=Totals)

    def play(self) -> Totals:
        self._begin()
        for day in range(self.num_days):
            self.day, self.now = day, START + timedelta(days=day)
            if day == self.falls_on:
                self._change_the_world()
            self._check()
            self._change_something()
            self._night()
            self.totals.left = max(0.0, self.reach - self.champion.level)
            self.totals.missed += self.totals.left / self.num_days
        return self.totals

    def _begin(self) -> None:
        self.version = 1
        self.checks: list[dict[str, Any]] = []
        self.data, self.recipe, self.pending_gain = 0, 0, 0.0
        self.reach = FIRST  # what the best recipe so far gives
        self.select = WORLD.draw_difficulty(self.rng)
        self.spendings: list[Spending] = []
        self.decided: list[Entry] = []
        self._renew_test_set()
        self.champion = self._train(FIRST)
        self.promoted = self._interval_of(self.champion.on_test)
        self.last = self._finish([])
        self.waiting: Model | None = None

    def _renew_test_set(self) -> None:
        self.test = WORLD.draw_difficulty(self.rng)
        number = len({entry.body["test"] for entry in self.decided}) + 1
        self.holdout = HoldoutSet(f"{number:032d}", tuple(f"{number}.{problem}" for problem in PROBLEMS))

    def _train(self, level: float) -> Model:
        return self._on_new_test(Model(level, WORLD.draw_policy(self.rng), np.empty(0, dtype=np.int8)))

    def _on_new_test(self, model: Model) -> Model:
        """The same model measured on the present test set, in the present world."""
        chances = expit(WORLD.level_for(round(model.level, 6)) + self.test + WORLD.draw_policy(self.rng))
        solved = (self.rng.random((SAMPLES, *chances.shape)) < chances).sum(axis=0).astype(np.int8)
        return Model(model.level, model.on_select, solved)

    def _interval_of(self, solved: Counts) -> Any:
        """As drift-check reads it: of the episodes of the promotion, at the confidence of a check."""
        played = as_success(np.arange(SAMPLES) < solved.reshape(-1, 1))
        return dict(summarise(episodes(played, GROUPS), confidence=confidence_of(_check_alphas()[0])))

    def _change_the_world(self) -> None:
        self.champion = self._on_new_test(
            Model(self.champion.level - self.fall, self.champion.on_select, self.champion.on_test)
        )
        self.reach = max(self.champion.level, self.reach - (1 - RECOVERED) * self.fall)

    def _check(self) -> None:
        """The champion on other problems of select each day."""
        settings, number = _drift_check(), self.day + 1
        alpha = _check_alphas()[self.day]
        chances = expit(WORLD.level_for(round(self.champion.level, 6)) + self.select + self.champion.on_select)
        chosen = choose_problems(range(WORLD.num_problems), settings, seed=11, number=number)
        solved = self.rng.random(len(chosen)) < chances.reshape(-1)[chosen]
        if solved.mean() >= self.promoted["ci_low"]:  # it is below that of any fall
            fell = False
        else:
            played = {PROBLEMS[place]: [bool(one)] for place, one in zip(chosen, solved, strict=True)}
            fell = has_fallen(summarise(episodes(played, GROUPS), confidence=confidence_of(alpha)), self.promoted)
        self.checks = [{"fell": fell, "champion": self.version, "at": self.now.isoformat()}]
        self._count_check(fell)

    def _count_check(self, fell: bool) -> None:
        has_lost = self.falls_on is not None and self.day >= self.falls_on and self.totals.replaced_after is None
        if fell and not has_lost:
            self.totals.false_alarms += 1
        elif fell and self.totals.found_after is None:
            self.totals.found_after = self.day - (self.falls_on or 0)

    def _change_something(self) -> None:
        has_data, has_recipe = self.rng.random(2) < (NEW_DATA, NEW_RECIPE)
        self.data, self.recipe = self.data + has_data, self.recipe + has_recipe
        if has_data or has_recipe:
            self.pending_gain = float(self.rng.choice(GAINS, p=CHANCES))

    def _night(self) -> None:
        changes = find_changes(self.last.inputs, self._inputs(), {}, PATHS)
        fall = find_fall(self.checks, self.version, self.last)
        if self.waiting is None and not changes and fall is None:
            return
        challenger = self.waiting or self._train_challenger()
        if self._is_worn():
            self.totals.renewals += 1
            self._renew_test_set()
            self.champion, self.waiting = self._on_new_test(self.champion), self._on_new_test(challenger)
            return
        self.waiting = None
        self._decide(challenger)
        self.last = self._finish([*(reason.kind for reason in changes), *(["champion_fell"] if fall else [])])
        if not changes and self.falls_on is None:
            self.totals.runs_for_nothing += 1

    def _train_challenger(self) -> Model:
        self.totals.runs += 1
        level = min(CEILING, self.reach + self.pending_gain)
        self.totals.improvements += self.pending_gain > 0
        self.reach, self.pending_gain = max(self.reach, level), 0.0
        return self._train(level)

    def _is_worn(self) -> bool:
        """As with promote.on_holdout_reuse: rotate; this decision would be one look more."""
        return self._history().looks_at(self.holdout).median + 1 > _params()["promote"]["max_looks_per_problem"]

    def _history(self) -> HoldoutHistory:
        """Of the present test set: test sets share no problem."""
        on_present = [entry for entry in self.decided if entry.body["test"] == self.holdout.name]
        return HoldoutHistory(on_present, [], {self.holdout.name: _hashes(self.holdout)})

    def _decide(self, challenger: Model) -> None:
        options = _promote_budget(self.planned)
        most = (1 - _params()["promote"]["confidence"]) / 2
        alpha = error_budget(options, self.spendings, at=self.now, most=most).alpha
        self.spendings.append(Spending(self.now, alpha))
        body = {"test": self.holdout.name, "evaluation": str(self.day), "alpha": alpha}
        self.decided.append(Entry(str(self.day), "decision", self.now.isoformat(), "", body))
        ours, theirs = challenger.on_test, self.champion.on_test
        if not SCREEN.could_pass(ours[None], theirs, [alpha])[0]:
            return
        successes = [as_success(np.arange(SAMPLES) < side.reshape(-1, 1)) for side in (ours, theirs)]
        if is_better(successes[0], successes[1], GROUPS, alpha):
            self._promote(challenger)

    def _promote(self, challenger: Model) -> None:
        self.totals.promotions += 1
        self.totals.no_better += challenger.level <= self.champion.level
        if self.falls_on is not None and self.day >= self.falls_on and self.totals.replaced_after is None:
            self.totals.replaced_after = self.day - self.falls_on
        self.champion, self.version = challenger, self.version + 1
        self.promoted = self._interval_of(challenger.on_test)

    def _inputs(self) -> dict[str, Any]:
        train = {"deps": {"problems.jsonl": str(self.data)}, "cmd": "train", "params": {"train": {"rate": self.recipe}}}
        return {"stages": {"train": train}, "promote": {}, "params": {"train": {"rate": self.recipe}}}

    def _finish(self, kinds: Sequence[str]) -> FinishedRun:
        at = self.now.isoformat() if hasattr(self, "now") else START.isoformat()
        return FinishedRun(f"run{at}", at, at, "", list(kinds), self.version, self._inputs())


_params = lru_cache(demo_params)


@lru_cache
def _drift_check() -> DriftCheckSettings:
    return DriftCheckSettings.model_validate(_params()["pipeline"]["drift_check"])


@lru_cache
def _check_alphas() -> tuple[float, ...]:
    """The error of each of a year's checks; nothing a check finds changes what the next one gets."""
    past: list[Mapping[str, Any]] = []
    for day in range(NUM_DAYS):
        at = START + timedelta(days=day)
        past.append({"at": at.isoformat(), "alpha": check_error(_drift_check(), past, at=at)})
    return tuple(row["alpha"] for row in past)


@lru_cache
def _promote_budget(planned: int | None) -> ErrorBudgetSettings:
    options = ErrorBudgetSettings.model_validate(_params()["promote"]["error_budget"])
    return options if planned is None else options.model_copy(update={"decisions_per_year": planned})


@lru_cache(maxsize=4)
def _hashes(holdout: HoldoutSet) -> frozenset[bytes]:
    from tasks.core.packed_hashes import unpack_hashes
    from tasks.tracking.holdout_reuse import HASH_BYTES

    return frozenset(unpack_hashes(holdout.to_entry().body["problems"], HASH_BYTES))


def years(num_trials: int, seed: int, **options: Any) -> Iterator[Totals]:
    for trial in range(num_trials):
        yield Deployments(np.random.default_rng([seed, trial]), **options).play()


@lru_cache(maxsize=2)
def quiet_years(num_trials: int, seed: int) -> tuple[Totals, ...]:
    """Years in which the world does not change; several rates are of the same ones."""
    return tuple(years(num_trials, seed))


def found_within(days: int, fall: float, num_trials: int, seed: int) -> list[float]:
    """Per fall on the thirtieth day: whether a check finds it within so many days, or a better model is promoted."""
    found = (
        min(day for day in (item.found_after, item.replaced_after, NUM_DAYS) if day is not None)
        for item in years(num_trials, seed, fall=fall, falls_on=30, num_days=31 + days)
    )
    return [float(day <= days) for day in found]


def simulate_deployments_no_better(num_trials: int, seed: int) -> list[float]:
    return [float(year.no_better > 0) for year in quiet_years(num_trials, seed)]


def simulate_deployments_false_alarm(num_trials: int, seed: int) -> list[float]:
    return [float(year.false_alarms > 0) for year in quiet_years(num_trials, seed)]


def simulate_deployments_improvement_in_production(num_trials: int, seed: int) -> list[float]:
    return [float(year.left < 0.025) for year in quiet_years(num_trials, seed)]


def simulate_fall_of_10_found(num_trials: int, seed: int) -> list[float]:
    return found_within(7, 0.1, num_trials, seed)


def simulate_fall_of_15_found(num_trials: int, seed: int) -> list[float]:
    return found_within(3, 0.15, num_trials, seed)


def simulate_fall_of_20_found(num_trials: int, seed: int) -> list[float]:
    return found_within(0, 0.2, num_trials, seed)


YEAR = "a year of the deployments, runs for a reason only: {}"
FALL = "400 problems of select a day: a fall of {} is found, or made good by another promotion"
RATES = (
    Rate(YEAR.format("a champion is made that is no better"),
         simulate_deployments_no_better, 100, 0.1, "most", "", 0.02),
    Rate(YEAR.format("even one drift check calls a champion fallen that is as good as it was"),
         simulate_deployments_false_alarm, 100, 0.1, "most", "", 0.06),
    Rate(YEAR.format("at its end no improvement of 3 points is still left out"),
         simulate_deployments_improvement_in_production, 100, None, "least", "", 0.7),
    Rate(FALL.format("10 points within 7 days"), simulate_fall_of_10_found, 60, None, "least", "", 0.6),
    Rate(FALL.format("15 points within 3 days"), simulate_fall_of_15_found, 60, None, "least", "", 0.9),
    Rate(FALL.format("20 points on the same day"), simulate_fall_of_20_found, 60, None, "least", "", 0.9),
)  # fmt: skip


def means(totals: Sequence[Totals]) -> dict[str, float]:
    """Of a year, for infra/benchmarks.md; `missed` and `left` in points."""
    names = (
        "runs",
        "runs_for_nothing",
        "promotions",
        "no_better",
        "improvements",
        "renewals",
        "false_alarms",
        "missed",
        "left",
    )
    unit = {"missed": 100, "left": 100}
    return {name: unit.get(name, 1) * float(np.mean([getattr(item, name) for item in totals])) for name in names}


if __name__ == "__main__":
    for planned in (None, 80):
        found = means(list(years(200, 1, planned=planned)))
        print(planned, ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
