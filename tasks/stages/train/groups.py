"""The trainer's `collect`: draw problems, play each several times, score the episodes; success by environment.

It connects the rollouts, which never see a reward, with the trainer, which never sees an environment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from tasks.chat.format import ChatFormat
from tasks.core.records import BY_ENVIRONMENT, Group, Problem, Trajectory
from tasks.learning.grpo.curriculum import ProblemSampler
from tasks.learning.grpo.prefixes import Prefixes
from tasks.learning.grpo.trainer import Collect
from tasks.learning.shared.settings import GRPOSettings
from tasks.rewards.parts import check_score, reward
from tasks.rewards.settings import RewardSettings
from tasks.rollouts.collect import Collector
from tasks.rollouts.episode import EpisodeKey
from tasks.rollouts.references import reference_messages
from tasks.tools.base import Environment

REPLACEMENT_DRAW = 1_000_000  # added to the draw number per round of dynamic sampling, so that no two draws share one


def group_collector(
    collector: Collector,
    sampler: ProblemSampler,
    *,
    prefixes: Prefixes | None,
    rewards: RewardSettings,
    explore: Callable[[int], int],
) -> Collect:
    """Plays each problem as often as `explore` says of the iteration, all from one of the `prefixes` where it has one;
    the sampler learns from the other groups.
    """

    def collect(iteration: int, round_number: int, num_problems: int) -> list[Group]:
        group_size = explore(iteration)
        problems = sampler.draw(iteration, round_number, num_problems)
        draw = iteration + REPLACEMENT_DRAW * round_number
        starts = prefixes.draw(iteration, round_number, problems) if prefixes else [()] * len(problems)
        keys = [
            EpisodeKey(problem, draw, sample, tuple(map(tuple, start)))
            for problem, start in zip(problems, starts, strict=True)
            for sample in range(group_size)
        ]
        trajectories = collector.collect(keys)
        groups = [
            score_group(problem, trajectories[number * group_size : (number + 1) * group_size], rewards, round_number)
            for number, problem in enumerate(problems)
        ]
        groups = [group for group in groups if group.trajectories]
        sampler.learn([group for group in groups if not group.is_prefixed])
        if prefixes:
            prefixes.learn(groups)
        return groups

    return collect


def load_prefixes(params: GRPOSettings, chat: ChatFormat, *, seed: int) -> Prefixes | None:
    options = params.exploration.prefixes if params.exploration else None
    return None if options is None else Prefixes(options, partial(reference_messages, chat), seed=seed)


def score_group(
    problem: Problem, trajectories: Sequence[Trajectory], rewards: RewardSettings, round_number: int
) -> Group:
    """Each trajectory keeps its score. Drops episodes that say nothing of the policy: those lost to a fault of the
    environment, which are never rewarded, and those that a replayed start ended before the policy wrote.
    """
    kept = [item for item in trajectories if not item.is_lost and item.own_turns]
    scores = [
        check_score(reward(problem, trajectory, rewards), problem=problem, trajectory=trajectory) for trajectory in kept
    ]
    for trajectory, score in zip(kept, scores, strict=True):
        trajectory.score = score
    return Group(problem.id, problem.category, kept, scores, round_number)


def success_by_environment(groups: Sequence[Group], environment: Environment) -> dict[str, dict[str, float]]:
    """Success of the batch in each environment of a mixture; nothing where there is only one. Groups that replaced
    others are left out, as in the success of the whole batch: they were drawn since those before had no signal.
    """
    played: dict[str, list[bool]] = defaultdict(list)
    for group in groups:
        name = environment.member_of(group.problem_id)
        if name is not None and group.round_number == 0 and not group.is_prefixed:
            played[name] += [trajectory.is_success for trajectory in group.trajectories]
    return {BY_ENVIRONMENT: {name: sum(won) / len(won) for name, won in sorted(played.items())}} if played else {}
