"""The collapse sentinel: watches the metrics of every iteration and says in plain words when training goes bad.

A policy that collapses does it in one order: completions grow, random characters appear, then success falls. The
sentinel looks at what comes before the fall, so that a run is stopped, or rolled back, while its last snapshots are
still good. Each signal has one threshold in the section `sentinel:` of params.yaml; null leaves it unwatched.

How numbers are read, so that one odd batch is no alarm, over a window of W iterations:
- a *level* is the median of the newest W/4;
- a *rise* is the level minus the level of the run's first W/4, which a roll back does not forget;
- *growth* is that of the least-squares line through the logarithms of the window, last point over first, from W/2
  iterations on: a factor, so it means the same for 60 tokens and for 2,000.

Two things look like collapse and are not. An agent that learns to recover from errors writes more, so completions may
grow by the factor success grows by. And one that has mastered its problems has little entropy and groups that are all
alike, so these two count only while success is low.

Rows in, at most one alarm an iteration out: no file is read, nothing is stopped here. Left out: a fall of success by
itself, which the draw of problems can cause, and which the choice of the best snapshot takes care of.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import linear_regression, median
from typing import Any

from tasks.stages.train.alarms import Alarm, Finding, Numbers, gravest
from tasks.stages.train.settings import SentinelSettings

WATCHED = (
    "iteration", "success_rate", "mean_sampled_tokens", "overlong_share", "entropy", "repetition",
    "informative_group_share", "mismatch_mean", "mismatch_weight_max", "ratio_max", "kl", "clip_share",
)  # fmt: skip
NULL_IF_NOT_FINITE = (
    "loss", "grad_norm", "kl", "ratio_max", "mismatch_mean", "mismatch_max", "mismatch_kl", "mismatch_weight_max",
)  # fmt: skip
LEAST_SUCCESS = 0.05  # below it success is too rare for its growth to be told from luck


class Sentinel:
    """Watches one run. All it remembers is `state()`, plain JSON: a sentinel given that goes on exactly the same."""

    def __init__(self, settings: SentinelSettings):
        self.settings = settings
        self.quarter, self.half = settings.window // 4, settings.window // 2
        self.rows: deque[Numbers] = deque(maxlen=settings.window)
        self.first_rows: list[Numbers] = []

    def observe(self, row: Mapping[str, Any]) -> Alarm | None:
        """Take in the metrics row of an iteration; the alarm of the gravest signal that is beyond its threshold.

        Numbers that an iteration without signal lacks (`kl`, `clip_share`, …) are left out of their medians. An alarm
        does not silence the next one; after a roll back, call `forget`.
        """
        broken = non_finite_numbers(row)
        numbers = {key: float(row[key]) for key in WATCHED if key not in broken and row.get(key) is not None}
        self.rows.append(numbers)
        if len(self.first_rows) < self.quarter:
            self.first_rows.append(numbers)
        found = {**self._findings(), "non_finite": _broken(broken, since=row["iteration"])}
        return gravest(row["iteration"], found)

    def forget(self) -> None:
        """After a roll back the window starts anew; what the run began with stays what a rise is measured from."""
        self.rows.clear()

    def state(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows], "first_rows": [dict(row) for row in self.first_rows]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.rows = deque((dict(row) for row in state["rows"]), maxlen=self.settings.window)
        self.first_rows = [dict(row) for row in state["first_rows"]]

    def _findings(self) -> dict[str, Finding | None]:
        """What each signal but the non-finite one sees; None is all well, unwatched, or too early to tell."""
        limits = self.settings
        return {
            "completion_length": self._length_growth(limits.max_length_growth),
            "overlong": self._rise(
                "overlong_share",
                limits.max_overlong_rise,
                "{now:.0%} of trajectories run into a token limit, {first:.0%} did at the start of the run; "
                "sentinel.max_overlong_rise is {limit:.0%}",
            ),
            "entropy_explosion": self._rise(
                "entropy",
                limits.max_entropy_rise,
                "entropy is {now:.2f} nats a sampled token, {first:.2f} at the start of the run; "
                "sentinel.max_entropy_rise is {limit:g}",
            ),
            "repetition": self._rise(
                "repetition",
                limits.max_repetition_rise,
                "{now:.0%} of all sequences of four sampled tokens occurred before in their trajectory, {first:.0%} "
                "did at the start of the run; sentinel.max_repetition_rise is {limit:.0%}",
            ),
            "mean_mismatch": self._excess(
                "mismatch_mean",
                limits.max_mean_mismatch,
                "the log-probs of engine and trainer are {now:.2g} nats a token apart on average; "
                "sentinel.max_mean_mismatch is {limit:g}",
            ),
            "mismatch": self._excess(
                "mismatch_weight_max",
                limits.max_mismatch_weight,
                "the trainer holds a token for {now:.3g} times as likely as the engine that sampled it; "
                "sentinel.max_mismatch_weight is {limit:g}",
            ),
            "ratio": self._excess(
                "ratio_max",
                limits.max_ratio,
                "a token becomes {now:.3g} times as likely within the steps of one batch; "
                "sentinel.max_ratio is {limit:g}",
            ),
            "kl": self._excess(
                "kl",
                limits.max_kl,
                "the policy is {now:.2f} nats a token away from its reference; sentinel.max_kl is {limit:g}",
            ),
            "clip": self._excess(
                "clip_share",
                limits.max_clip_share,
                "the ratios of {now:.0%} of the tokens are clipped; sentinel.max_clip_share is {limit:.0%}",
            ),
            "entropy_collapse": self._entropy_collapse(limits.min_entropy),
            "zero_variance": self._zero_variance(limits.max_zero_variance_share),
        }

    def _length_growth(self, limit: float | None) -> Finding | None:
        """Growth of the mean completion beyond the growth of success."""
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

    def _rise(self, key: str, limit: float | None, words: str) -> Finding | None:
        """A level more than `limit` above that of the run's first iterations."""
        now, first = level(self.rows, key, of=self.quarter), level(self.first_rows, key, of=self.quarter)
        if limit is None or now is None or first is None or now - first <= limit:
            return None
        seen = words.format(now=now, first=first, limit=limit)
        return Finding(seen, {key: now, "first": first, "limit": limit}, self._since(self.settings.window))

    def _excess(self, key: str, limit: float | None, words: str) -> Finding | None:
        """A level above `limit`."""
        now = level(self.rows, key, of=self.quarter)
        if limit is None or now is None or now <= limit:
            return None
        return Finding(words.format(now=now, limit=limit), {key: now, "limit": limit}, self._since(self.quarter))

    def _entropy_collapse(self, limit: float | None) -> Finding | None:
        """Hardly any entropy left while success is low."""
        now, success = (level(self.rows, key, of=self.quarter) for key in ("entropy", "success_rate"))
        if limit is None or now is None or success is None or now >= limit or success >= self.settings.low_success:
            return None
        return Finding(
            f"entropy is {now:.2g} nats a sampled token while only {success:.0%} of trajectories succeed; "
            f"sentinel.min_entropy is {limit:g}",
            {"entropy": now, "success_rate": success, "limit": limit},
            self._since(self.quarter),
        )

    def _zero_variance(self, limit: float | None) -> Finding | None:
        """Groups of equal rewards over the whole window, since a few draws of too hard problems are no collapse."""
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


def level(rows: Sequence[Numbers], key: str, *, of: int) -> float | None:
    """Median of `key` over the newest `of` rows; None where there are fewer, or where most of them lack it."""
    newest = list(rows)[-of:]
    present = [row[key] for row in newest if key in row]
    return median(present) if len(newest) == of and 2 * len(present) > of else None


def fitted_ends(rows: Sequence[Numbers], key: str, *, least: float) -> tuple[float, float]:
    """First and last point of the exponential curve through `key`: least squares on the logarithm of max(key, least).

    Least squares and not a median of slopes: what collapses is quiet for long and then steep, and a median would wait
    until the steep part is most of the window.
    """
    points = [(row["iteration"], math.log(max(row[key], least))) for row in rows]
    slope, intercept = linear_regression(*zip(*points, strict=True))
    return math.exp(intercept + slope * points[0][0]), math.exp(intercept + slope * points[-1][0])


def non_finite_numbers(row: Mapping[str, Any]) -> list[str]:
    """The names of the row's numbers that are infinite or not a number, as themselves or as the null that JSON has."""
    names = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    names += [key for key in NULL_IF_NOT_FINITE if key in row and row[key] is None]
    return names or (["loss or gradient"] if row.get("non_finite") else [])


def _broken(names: Sequence[str], *, since: int) -> Finding | None:
    if not names:
        return None
    return Finding(f"{', '.join(names)}: not a finite number", {}, since)
