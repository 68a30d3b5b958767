"""What the baseline says of a run before it starts: groups without signal by group size, episodes and tokens.

Used by the stage, and by `python -m tasks plan`, which adds the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.core.files import read_json, read_jsonl
from tasks.core.records import Problem, Trajectory
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.text import counted
from tasks.learning.grpo.curriculum import ProblemSampler
from tasks.learning.grpo.exploration import iterations_by_samples
from tasks.learning.grpo.signal import ExpectedSignal, expected_signal
from tasks.learning.grpo.solve_rates import Played
from tasks.learning.shared.settings import GRPOSettings

MOST_WITHOUT_SIGNAL = 0.75  # of the groups, without a warning


@dataclass(frozen=True, slots=True)
class Baseline:
    """Episodes of the model that training starts from; tokens are the mean that it sampled per episode, and a share of
    its episodes ran out of them.
    """

    played: Sequence[Played]
    sampled_tokens: float
    overlong_share: float = 0.0


@dataclass(frozen=True, slots=True)
class OutlookRow:
    """Of a run with this group size. Tokens are sampled ones, at the baseline's length. Without a useful group no
    number of episodes is enough for one: None.
    """

    group_size: int
    without_signal: float
    episodes_per_useful_group: float | None
    episodes: float
    sampled_tokens: float


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Of the run as it is set: `num_iterations` by the group size that they have, one size unless samples are
    scheduled. `without_signal` is the mean over the iterations.
    """

    num_iterations: Mapping[int, int]
    without_signal: float
    episodes: float
    sampled_tokens: float

    @property
    def sizes(self) -> str:
        return " and ".join(f"G = {size}" for size in self.num_iterations)

    @property
    def sentence(self) -> str:
        episodes, tokens = f"{self.episodes:,.0f} episodes", f"{self.sampled_tokens:,.0f} sampled tokens"
        return f"as set, with {self.sizes}, about {episodes} and {tokens}"


@dataclass(frozen=True, slots=True)
class Outlook:
    rows: Sequence[OutlookRow]
    planned: PlannedRun
    recommended: int
    num_played: int

    @property
    def sentence(self) -> str:
        shares = ", ".join(f"{row.without_signal:.0%} of G = {row.group_size}" for row in self.rows)
        return (
            f"expected without signal: {shares} (from {counted(self.num_played, 'episode')}); G = {self.recommended} "
            "fits best"
        )

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def read_baseline(paths: Paths) -> Baseline | None:
    """The episodes of assess, or where a warm start trained, those that judged it; None before the two have run, and
    after a warm start that nobody looked at (`warm_start.stop: null`): training then starts from an unknown model.
    """
    gate = paths.stage("assess") / "baseline.json"
    if not gate.exists():
        return None
    played_by = "warm_start" if read_json(gate)["gate"] == "warm_start" else "assess"
    file = paths.stage(played_by) / "trajectories.jsonl"
    if not file.exists():
        return None
    return baseline_of([Trajectory.from_row(row) for _, row in read_jsonl(file)], read_split(paths, "select"))


def baseline_of(trajectories: Sequence[Trajectory], problems: Sequence[Problem]) -> Baseline | None:
    """Episodes that a fault of the environment ended are no evidence."""
    known = {problem.id: problem for problem in problems}
    kept = [item for item in trajectories if not item.is_lost and item.problem_id in known]
    if not kept:
        return None
    played = [Played(known[item.problem_id], int(item.is_success), 1) for item in kept]
    overlong_share = sum(item.outcome == "overlong" for item in kept) / len(kept)
    return Baseline(played, sum(item.num_sampled_tokens for item in kept) / len(kept), overlong_share)


def expect(settings: GRPOSettings, problems: Sequence[Problem], baseline: Baseline) -> Outlook:
    """Of problems as the sampler draws them at the start; later the policy is another."""
    sampler = ProblemSampler(problems, settings, seed=0, baseline=baseline.played)
    rates, weights = sampler.solve_rates(), sampler.weights()
    names = list(weights)
    sizes = iterations_by_samples(settings)
    signal = expected_signal([rates[name] for name in names], [weights[name] for name in names], group_sizes=sizes)
    rows = [_row(size, signal, settings, baseline.sampled_tokens) for size in signal.without_signal]
    planned = _planned(sizes, signal, settings, baseline.sampled_tokens)
    return Outlook(rows, planned, signal.recommended, len(baseline.played))


def _row(size: int, signal: ExpectedSignal, settings: GRPOSettings, sampled_tokens: float) -> OutlookRow:
    episodes = _episodes(size, settings.num_iterations, signal, settings)
    return OutlookRow(
        group_size=size,
        without_signal=signal.without_signal[size],
        episodes_per_useful_group=signal.episodes_per_useful_group(size),
        episodes=episodes,
        sampled_tokens=episodes * sampled_tokens,
    )


def _planned(
    sizes: Mapping[int, int], signal: ExpectedSignal, settings: GRPOSettings, sampled_tokens: float
) -> PlannedRun:
    episodes = sum(_episodes(size, count, signal, settings) for size, count in sizes.items())
    return PlannedRun(
        num_iterations=dict(sizes),
        without_signal=sum(count * signal.without_signal[size] for size, count in sizes.items()) / sum(sizes.values()),
        episodes=episodes,
        sampled_tokens=episodes * sampled_tokens,
    )


def _episodes(size: int, num_iterations: int, signal: ExpectedSignal, settings: GRPOSettings) -> float:
    return signal.num_episodes(
        size,
        num_iterations=num_iterations,
        problems_per_iteration=settings.problems_per_iteration,
        replacement_rounds=settings.max_replacement_rounds,
    )


def warning_of(settings: GRPOSettings, outlook: Outlook) -> str | None:
    """Where most groups would teach nothing, with what to set; None where enough of them would."""
    share = outlook.planned.without_signal
    if share <= MOST_WITHOUT_SIGNAL:
        return None
    remedy = ", or ".join([*_better_settings(settings, outlook), "bring problems of another difficulty"])
    return (
        f"{share:.0%} of the groups would teach nothing, because all their episodes succeed or all fail. "
        f"{remedy[0].upper()}{remedy[1:]} (curate.max_level, where they are generated)."
    )


def _better_settings(train: GRPOSettings, outlook: Outlook) -> list[str]:
    """What could be set, but for what is set already."""
    found = [] if train.problem_sampler == "band" else ["set train.problem_sampler to band"]
    if max(outlook.planned.num_iterations) >= outlook.recommended:
        return found
    is_scheduled = train.exploration is not None and train.exploration.samples_per_problem is not None
    samples = "train.exploration.samples_per_problem up" if is_scheduled else "train.group_size"
    return [*found, f"set {samples} to {outlook.recommended}"]
