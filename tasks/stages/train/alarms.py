"""The sentinel's alarms: of several findings the gravest, with why it matters and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Numbers: TypeAlias = dict[str, float]

# The gravest signal first: of several in one iteration the first is the alarm.
ADVICE: dict[str, str] = {
    "non_finite": "Weights that take such a step are lost. Lower train.learning_rate, and look for a cause in the kept "
    "trajectories.",
    "completion_length": "Text that grows without solving more is how a collapse begins: random characters follow, "
    "then success falls. Read the kept trajectories; if they fill up with noise, lower train.learning_rate or raise "
    "train.kl_weight, and if the longer text is wanted, raise sentinel.max_length_growth.",
    "unearned_reward": "The policy then earns its reward by the parts instead of by solving problems: reward hacking. "
    "Read the trajectories that earned most without success, then lower the weight in reward.parts that they farm, or "
    "take that part out.",
    "overlong": "Such a trajectory solves nothing, and with train.filter_overlong it costs nothing either, so nothing "
    "limits completions. Read the kept trajectories; if they fill up with noise, lower train.learning_rate or set "
    "train.filter_overlong to false, and if they are sound, raise sampling.max_tokens_per_episode.",
    "entropy_explosion": "The policy is turning into noise: random characters show before success falls. Lower "
    "train.learning_rate or sampling.temperature, or raise train.kl_weight.",
    "repetition": "A policy that repeats itself is caught in a loop and ends at its limits. Read the kept "
    "trajectories, then lower train.learning_rate or raise train.kl_weight.",
    "mean_mismatch": "Episodes then come from another policy than the one that is trained. Check that engine and "
    "trainer have the same weights, precision and temperature, and lower train.max_staleness.",
    "mismatch": "The engine then samples from another distribution than the trainer believes, so gradients are wrong. "
    "Check that both have the same weights, precision and temperature, set train.importance_correction, or "
    "lower train.max_staleness.",
    "ratio": "The policy then moves so far in one batch that the batch says little about it. Lower train.learning_rate "
    "or train.updates_per_batch.",
    "kl": "What the policy could do before it may be lost. Lower train.learning_rate, raise train.kl_weight, or let "
    "the reference follow by train.reference_interval.",
    "clip": "So many show that steps are too large: a clipped token teaches nothing, and with train.loss cispo less or "
    "more than it should. Lower train.learning_rate or train.updates_per_batch.",
    "entropy_collapse": "A policy that is certain of failing actions explores nothing new. Raise sampling.temperature "
    "or train.clip_high, or start from a stronger model.",
    "zero_variance": "Equal rewards teach nothing, so the run only costs time. Give it easier problems, a longer warm "
    "start or a larger train.group_size.",
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why training should stop or roll back; `since` is the first iteration of the evidence, and a roll back goes
    before it.
    """

    iteration: int
    signal: str
    message: str
    values: Numbers
    since: int


@dataclass(frozen=True, slots=True)
class Finding:
    seen: str
    values: Numbers
    since: int


def gravest_alarm(iteration: int, found: Mapping[str, Finding | None]) -> Alarm | None:
    """The alarm of the gravest finding; its message ends with the other findings."""
    findings = [(signal, finding) for signal in ADVICE if (finding := found.get(signal)) is not None]
    if not findings:
        return None
    (signal, first), *others = findings
    message = f"iteration {iteration}: {first.seen}. {ADVICE[signal]}"
    if others:
        message += f" Also seen: {'; '.join(other.seen for _, other in others)}."
    return Alarm(iteration, signal, message, first.values, first.since)
