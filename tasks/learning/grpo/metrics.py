"""The metrics of an iteration, one line of metrics.jsonl; non-finite values are null."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tasks.core.records import MEAN_PARTS, Group, Metrics, Score, Trajectory
from tasks.learning.grpo.credit import carries_loss, has_signal
from tasks.learning.grpo.exploration import samples_at
from tasks.learning.shared.optimizer import Step
from tasks.learning.shared.settings import GRPOSettings
from tasks.models.differences import Differences

NGRAM = 4  # tokens; ordinary tool calls seldom repeat this many


def rollout_metrics(groups: Sequence[Group], settings: GRPOSettings, oldest: int | None) -> Metrics:
    """Shares are of trajectories, `informative_group_share` of groups; entropy is in nats per token. Groups that began
    with a prefix count as episodes and as groups; the rest is of those that were played from their start. What there
    is nothing to measure by is left out: after an outage 0 would read as a policy that solves nothing.
    """
    from_start = [group for group in groups if not group.is_prefixed]
    trajectories = [trajectory for group in from_start for trajectory in group.trajectories]
    count = len(trajectories)
    num_sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    measured = {
        "success_rate": _share(sum(trajectory.is_success for trajectory in trajectories), count),
        "mean_reward": _share(sum(sum(score.reward for score in group.scores) for group in from_start), count),
        "mean_sampled_tokens": _share(num_sampled, count),
        "mean_turns": _share(sum(len(trajectory.turns) for trajectory in trajectories), count),
        "informative_group_share": _share(
            sum(is_informative(group, settings, oldest) for group in groups), len(groups)
        ),
        "overlong_share": _share(sum(trajectory.outcome == "overlong" for trajectory in trajectories), count),
        "max_turns_share": _share(sum(trajectory.outcome == "max_turns" for trajectory in trajectories), count),
        # The mean of −log p over sampled tokens is an unbiased estimate of the entropy of what they were drawn from.
        "entropy": _share(
            -sum(sum(item.sampler_logp) for trajectory in trajectories for item in trajectory.sequences), num_sampled
        ),
        "repetition": _share(sum(map(repetition, trajectories)), count),
    }
    return {
        "num_episodes": sum(len(group.trajectories) for group in groups),
        **{name: value for name, value in measured.items() if value is not None},
        **thinking_metrics(trajectories),
        **sequence_metrics(trajectories),
        **part_metrics([score for group in from_start for score in group.scores]),
        **prefix_metrics([group for group in groups if group.is_prefixed]),
    }


def is_informative(group: Group, settings: GRPOSettings, oldest: int | None) -> bool:
    """Whether its rewards teach something: the trainer gives it credit, and some token that carries loss is of the
    `oldest` version that does, or of a later one.
    """
    pairs = zip(group.trajectories, carries_loss(group, settings), strict=True)
    counted = [item for item, is_counted in pairs if is_counted]
    return has_signal(group, settings) and any(_is_fresh(item, oldest) for item in counted)


def _is_fresh(trajectory: Trajectory, oldest: int | None) -> bool:
    return oldest is None or any(
        version >= oldest for tokens in trajectory.sequences for version in trajectory.sampled_versions(tokens)
    )


def _share(total: float, count: int) -> float | None:
    return total / count if count else None


def prefix_metrics(groups: Sequence[Group]) -> Metrics:
    """Of the groups that began with replayed turns; empty without any."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {}
    return {
        "num_prefixed_groups": len(groups),
        "prefixed_success_rate": sum(trajectory.is_success for trajectory in trajectories) / len(trajectories),
        "mean_replayed_turns": sum(trajectory.num_replayed_turns for trajectory in trajectories) / len(trajectories),
    }


def exploration_metrics(settings: GRPOSettings, iteration: int, temperature: float, top_p: float) -> Metrics:
    """What the schedules say of this iteration; nothing where there are none."""
    if settings.exploration is None:
        return {}
    return {"temperature": temperature, "top_p": top_p, "samples_per_problem": samples_at(settings, iteration)}


def part_metrics(scores: Sequence[Score]) -> Metrics:
    """What each part of the reward added per trajectory; empty where the outcome is the only one."""
    names = list(dict.fromkeys(name for score in scores for name in score.parts))
    if len(names) < 2:
        return {}
    return {MEAN_PARTS: {name: sum(score.parts[name] for score in scores) / len(scores) for name in names}}


def thinking_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Tokens of thoughts per trajectory, and the share of thoughts that their budget cut; empty without a thought."""
    thoughts = [turn for trajectory in trajectories for turn in trajectory.turns if turn.thought is not None]
    if not thoughts:
        return {}
    return {
        "mean_thinking_tokens": sum(turn.num_thought_tokens for turn in thoughts) / len(trajectories),
        "cut_thought_share": sum(turn.thought_was_cut for turn in thoughts) / len(thoughts),
    }


def sequence_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Token sequences per trajectory; empty where none has several."""
    counts = [len(trajectory.sequences) for trajectory in trajectories]
    return {"mean_sequences": sum(counts) / len(counts)} if max(counts, default=0) > 1 else {}


def repetition(trajectory: Trajectory) -> float:
    written = [sequence.sampled_ids for sequence in trajectory.sequences]
    grams = [tuple(ids[start : start + NGRAM]) for ids in written for start in range(len(ids) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


@dataclass(slots=True)
class StepSums:
    num_tokens: int
    loss: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    ratio_max: float = 0.0

    @classmethod
    def over(cls, parts: Sequence[StepSums]) -> StepSums:
        """Of the whole step, from what each rank or micro-batch found."""
        return cls(
            num_tokens=sum(sums.num_tokens for sums in parts),
            loss=sum(sums.loss for sums in parts),
            kl=sum(sums.kl for sums in parts),
            clipped=sum(sums.clipped for sums in parts),
            ratio_max=max(sums.ratio_max for sums in parts),
        )

    def metrics(self) -> Metrics:
        return {
            "loss": finite(self.loss),
            "kl": finite(self.kl / self.num_tokens),
            "clip_share": self.clipped / self.num_tokens,
            "ratio_max": finite(self.ratio_max),
        }


def step_metrics(sums: StepSums, step: Step) -> Metrics:
    return {
        **sums.metrics(),
        "grad_norm": finite(step.grad_norm),
        "learning_rate": step.learning_rate,
        "non_finite": not step.is_finite,
    }


def pass_metrics(steps: Sequence[Metrics]) -> Metrics:
    """The steps of one pass over a batch as one row: means, with the largest ratio and the last rate. A value that was
    not finite in one step is null.
    """
    return {
        **{name: _mean([step[name] for step in steps]) for name in ("loss", "kl", "clip_share")},
        "ratio_max": None if any(step["ratio_max"] is None for step in steps) else max(s["ratio_max"] for s in steps),
        "grad_norm": _mean([step["grad_norm"] for step in steps]),
        "learning_rate": steps[-1]["learning_rate"],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(values) if len(numbers) == len(values) else None


def mismatch_metrics(old_logp_M: Tensor, sampler_logp_M: Tensor) -> Metrics:
    """Engine against trainer, |old − sampler| in nats with its quantiles; `mismatch_kl` is k3 of KL(sampler ‖ trainer),
    the weight exp(old − sampler) before any cap.
    """
    difference_M = old_logp_M - sampler_logp_M
    weight_M = difference_M.exp()
    found = Differences.of(difference_M.tolist())
    return {
        "mismatch_mean": finite(difference_M.abs().mean().item()),
        "mismatch_p50": finite(found.median),
        "mismatch_p99": finite(found.p99),
        "mismatch_max": finite(found.max),
        "mismatch_kl": finite((weight_M - difference_M - 1).mean().item()),
        "mismatch_weight_max": finite(weight_M.max().item()),
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
