"""The collapse sentinel: reads the metrics of every iteration and raises an alarm when training goes bad.

A policy collapses in one order: completions grow, random characters appear, then success falls. The sentinel looks at
what comes before the fall, while the last snapshots are still good. Numbers are read over a window of W iterations:
- a *level* is the median of the newest W/4;
- a *rise* is the level minus the level of the run's first W/4, or that of the model that training started from where it
  was played and that is lower: a collapse may be over by W/4. A roll back forgets neither;
- *growth* is a factor: last point over first on the least-squares line through the logarithms, from W/2 rows on.

An agent that learns to recover from errors writes more, so completions may grow by the factor that success grows by. A
policy that has mastered its problems has little entropy and groups of equal rewards, so these count only while success
is low. A fall of success alone is no signal: the draw of problems can cause it.

Reward beyond success is what the parts add. Where it rises and success does not, both with evidence over the window
(by the interval of the slope, Student's t), the policy is farming a part. That shows before success falls. A part may
be farmed within a few iterations, so this is judged from W/4 rows on: the interval of few rows is wide by itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression, median
from typing import Any

from tasks.core.records import Group
from tasks.stages.train.alarms import Alarm, Finding, Numbers, gravest_alarm
from tasks.stages.train.settings import SentinelSettings

WATCHED = (
    "iteration", "success_rate", "mean_reward", "mean_sampled_tokens", "overlong_share", "entropy", "repetition",
    "informative_group_share", "mismatch_mean", "mismatch_weight_max", "ratio_max", "kl", "clip_share",
)  # fmt: skip
NULL_IF_NOT_FINITE = (
    "loss", "grad_norm", "kl", "ratio_max", "mismatch_mean", "mismatch_max", "mismatch_kl", "mismatch_weight_max",
)  # fmt: skip
OF_EPISODES = (
    "success_rate", "mean_reward", "mean_sampled_tokens", "overlong_share", "entropy", "repetition",
    "informative_group_share",
)  # fmt: skip
LEAST_ROWS = 4  # for the interval of a slope
LEAST_SUCCESS = 0.05  # below it success is too rare to tell its growth from luck
# signal: (key of the metrics row, setting with its limit, words). A rise is measured from the start of the run.
RISES = {
    "overlong": (
        "overlong_share", "max_overlong_rise",
        "{now:.0%} of trajectories reach a token limit, {first:.0%} did at the start of the run; "
        "sentinel.max_overlong_rise is {limit:.0%}",
    ),
    "entropy_explosion": (
        "entropy", "max_entropy_rise",
        "entropy is {now:.2f} nats per sampled token, {first:.2f} at the start of the run; "
        "sentinel.max_entropy_rise is {limit:g}",
    ),
    "repetition": (
        "repetition", "max_repetition_rise",
        "{now:.0%} of all sequences of four sampled tokens occurred before in their trajectory, {first:.0%} did at the "
        "start of the run; sentinel.max_repetition_rise is {limit:.0%}",
    ),
}  # fmt: skip
EXCESSES = {
    "mean_mismatch": (
        "mismatch_mean", "max_mean_mismatch",
        "the log-probs of engine and trainer differ by {now:.2g} nats per token on average; "
        "sentinel.max_mean_mismatch is {limit:g}",
    ),
    "mismatch": (
        "mismatch_weight_max", "max_mismatch_weight",
        "to the trainer a token is {now:.3g} times as likely as to the engine that sampled it; "
        "sentinel.max_mismatch_weight is {limit:g}",
    ),
    "ratio": (
        "ratio_max", "max_ratio",
        "a token becomes {now:.3g} times as likely within the steps of one batch; sentinel.max_ratio is {limit:g}",
    ),
    "kl": (
        "kl", "max_kl", "the policy is {now:.2f} nats per token from its reference; sentinel.max_kl is {limit:g}",
    ),
    "clip": (
        "clip_share", "max_clip_share",
        "the ratios of {now:.0%} of the tokens are clipped; sentinel.max_clip_share is {limit:.0%}",
    ),
}  # fmt: skip


class Sentinel:
    """Watches one run. `state()` is everything it remembers, as JSON."""

    def __init__(self, settings: SentinelSettings):
        self.settings = settings
        self.quarter, self.half = settings.window // 4, settings.window // 2
        self.rows: deque[Numbers] = deque(maxlen=settings.window)
        self.first_rows: list[Numbers] = []
        self.changed_limits: dict[str, list[float | None]] = {}  # [before, now], since the run was stopped
        self.start: Mapping[str, float] = {}  # levels of the model that training started from, where they are known

    def observe(self, row: Mapping[str, Any]) -> Alarm | None:
        """Numbers that an iteration lacks are left out of their medians: without signal `kl`, `clip_share`, …, and what
        is of episodes where all were lost. The first rows are of iterations that have episodes.
        """
        broken = non_finite_numbers(row)
        numbers = {key: float(row[key]) for key in WATCHED if key not in broken and row.get(key) is not None}
        self.rows.append(numbers)
        if len(self.first_rows) < self.quarter and "success_rate" in numbers:
            self.first_rows.append(numbers)
        found = self._findings()
        if broken:
            found["non_finite"] = Finding(f"{', '.join(broken)}: not a finite number", {}, row["iteration"])
        return gravest_alarm(row["iteration"], found)

    def forget(self) -> None:
        """After a roll back: start a new window, but keep the first rows, from which a rise is measured."""
        self.rows.clear()

    def state(self) -> dict[str, Any]:
        rows = {"rows": [dict(row) for row in self.rows], "first_rows": [dict(row) for row in self.first_rows]}
        return {**rows, "limits": self.settings.limits()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rows = deque((dict(row) for row in state["rows"]), maxlen=self.settings.window)
        self.first_rows = [dict(row) for row in state["first_rows"]]
        before = state["limits"]
        now = self.settings.limits().items()
        self.changed_limits = {name: [before[name], limit] for name, limit in now if limit != before[name]}

    def take_changed_limits(self) -> dict[str, Any]:
        """For the first row of the metrics since they changed."""
        found, self.changed_limits = self.changed_limits, {}
        return {"changed_limits": found} if found else {}

    def _findings(self) -> dict[str, Finding | None]:
        """The finding of each signal but `non_finite`; None: no fault, unwatched, or too early to judge."""
        return {
            "completion_length": self._length_growth(self.settings.max_length_growth),
            **{signal: self._rise(*row) for signal, row in RISES.items()},
            **{signal: self._excess(*row) for signal, row in EXCESSES.items()},
            "entropy_collapse": self._entropy_collapse(self.settings.min_entropy),
            "unearned_reward": self._unearned_rise(self.settings.max_unearned_rise),
            "zero_variance": self._zero_variance(self.settings.max_zero_variance_share),
        }

    def _length_growth(self, limit: float | None) -> Finding | None:
        rows = [row for row in self.rows if "mean_sampled_tokens" in row and "success_rate" in row]
        if limit is None or len(rows) < self.half:
            return None
        before, now = fitted_ends(rows, "mean_sampled_tokens", least=1.0)
        success_before, success_now = fitted_ends(rows, "success_rate", least=LEAST_SUCCESS)
        growth, explained = now / before, max(1.0, success_now / success_before)
        if growth <= limit * explained:
            return None
        return Finding(
            f"completions grew from {before:.0f} to {now:.0f} tokens (×{growth:.2f}) in {len(self.rows)} iterations, "
            f"while success went from {success_before:.0%} to {success_now:.0%} (which explains ×{explained:.2f}); "
            f"sentinel.max_length_growth is ×{limit:g}",
            {"length_growth": growth, "success_growth": explained, "mean_sampled_tokens": now, "limit": limit},
            self._since(self.settings.window),
        )

    def _unearned_rise(self, limit: float | None) -> Finding | None:
        rows = [row for row in self.rows if "mean_reward" in row and "success_rate" in row]
        if limit is None or len(rows) < max(self.quarter, LEAST_ROWS):
            return None
        iterations = [row["iteration"] for row in rows]
        unearned = [row["mean_reward"] - row["success_rate"] for row in rows]
        low, rise, high = fitted_rise(iterations, unearned, confidence=self.settings.confidence)
        if low <= limit or median(unearned[-self.quarter :]) <= 0:  # a penalty that shrinks adds nothing to success
            return None
        success = fitted_rise(iterations, [row["success_rate"] for row in rows], confidence=self.settings.confidence)
        if success[0] > 0:
            return None
        return Finding(
            f"reward beyond success rose by {rise:.2f} ({low:.2f} to {high:.2f}) per episode in {len(rows)} "
            f"iterations, while success did not rise with evidence "
            f"({100 * success[0]:+.0f} to {100 * success[2]:+.0f} points); sentinel.max_unearned_rise is {limit:g}",
            {"unearned_rise": rise, "low": low, "success_rise": success[1], "limit": limit},
            self._since(self.settings.window),
        )

    def _rise(self, key: str, setting: str, words: str) -> Finding | None:
        limit: float | None = getattr(self.settings, setting)
        now, first = level(self.rows, key, of=self.quarter), level(self.first_rows, key, of=self.quarter)
        if first is not None:
            first = min(first, self.start.get(key, first))
        if limit is None or now is None or first is None or now - first <= limit:
            return None
        seen = words.format(now=now, first=first, limit=limit)
        return Finding(seen, {key: now, "first": first, "limit": limit}, self._since(self.settings.window))

    def _excess(self, key: str, setting: str, words: str) -> Finding | None:
        limit: float | None = getattr(self.settings, setting)
        now = level(self.rows, key, of=self.quarter)
        if limit is None or now is None or now <= limit:
            return None
        return Finding(words.format(now=now, limit=limit), {key: now, "limit": limit}, self._since(self.quarter))

    def _entropy_collapse(self, limit: float | None) -> Finding | None:
        now, success = (level(self.rows, key, of=self.quarter) for key in ("entropy", "success_rate"))
        if limit is None or now is None or success is None or now >= limit or success >= self.settings.low_success:
            return None
        return Finding(
            f"entropy is {now:.2g} nats per sampled token while only {success:.0%} of trajectories succeed; "
            f"sentinel.min_entropy is {limit:g}",
            {"entropy": now, "success_rate": success, "limit": limit},
            self._since(self.quarter),
        )

    def _zero_variance(self, limit: float | None) -> Finding | None:
        """Over the whole window, since a few draws of too hard problems are no collapse."""
        of = self.settings.window
        signal, success = (level(self.rows, key, of=of) for key in ("informative_group_share", "success_rate"))
        if limit is None or signal is None or success is None or success >= self.settings.low_success:
            return None
        if 1 - signal <= limit:
            return None
        return Finding(
            f"{1 - signal:.0%} of groups had equal rewards over {of} iterations, while only {success:.0%} of "
            f"trajectories succeed; sentinel.max_zero_variance_share is {limit:.0%}",
            {"zero_variance_share": 1 - signal, "success_rate": success, "limit": limit},
            self._since(of),
        )

    def _since(self, num_rows: int) -> int:
        return int(list(self.rows)[-num_rows:][0]["iteration"])


def fair_row(row: Mapping[str, Any], groups: Sequence[Group], *, most_lost: float) -> Mapping[str, Any]:
    """What the sentinel reads of a row. Where faults lost more than the share `most_lost` of the iteration's episodes,
    those that are left in its `groups` (perhaps those that need no tool) say nothing fair of the policy, and nothing of
    them is read.
    """
    num_lost, num_left = row["episodes_dropped"], sum(len(group.trajectories) for group in groups)
    if num_lost <= most_lost * (num_lost + num_left):
        return row
    return {name: value for name, value in row.items() if name not in OF_EPISODES}


def level(rows: Sequence[Numbers], key: str, *, of: int) -> float | None:
    """Median of `key` over the newest `of` rows; None where there are fewer, or where most of them lack it."""
    newest = list(rows)[-of:]
    present = [row[key] for row in newest if key in row]
    return median(present) if len(newest) == of and 2 * len(present) > of else None


def fitted_ends(rows: Sequence[Numbers], key: str, *, least: float) -> tuple[float, float]:
    """First and last point of the least-squares line through log max(key, least), as values of `key`.

    Not a median of slopes, which would wait until the steep part of a collapse is most of the window.
    """
    points = [(row["iteration"], math.log(max(row[key], least))) for row in rows]
    slope, intercept = linear_regression(*zip(*points, strict=True))
    return math.exp(intercept + slope * points[0][0]), math.exp(intercept + slope * points[-1][0])


def fitted_rise(xs: Sequence[float], ys: Sequence[float], *, confidence: float) -> tuple[float, float, float]:
    """(low, rise, high): the rise of the least-squares line from the first x to the last, with its interval."""
    from scipy.special import stdtrit

    slope, intercept = linear_regression(xs, ys)
    left_over = math.fsum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    spread = math.fsum((x - fmean(xs)) ** 2 for x in xs)
    freedom = len(xs) - 2
    half_width = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(left_over / freedom / spread)
    span = xs[-1] - xs[0]
    return (slope - half_width) * span, slope * span, (slope + half_width) * span


def non_finite_numbers(row: Mapping[str, Any]) -> list[str]:
    names = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    names += [key for key in NULL_IF_NOT_FINITE if key in row and row[key] is None]
    return names or (["loss or gradient"] if row.get("non_finite") else [])
