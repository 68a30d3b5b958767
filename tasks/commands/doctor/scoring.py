"""Checks of success and reward: references score 1, doing nothing does not, and no reward is out of its range.

Parts that read a judge's opinion are left out: a judge that decides nothing is not asked, so as to cost nothing.
"""

from __future__ import annotations

from collections import Counter

from tasks.commands.doctor.agents import is_judged_by_agent
from tasks.commands.doctor.context import DoctorContext, batches_for, choose
from tasks.commands.doctor.findings import Finding, failed, list_some, passed, warned
from tasks.commands.doctor.size_of_test import more_test_problems
from tasks.core.records import Problem, Score, Trajectory
from tasks.core.text import counted
from tasks.rewards.dominance import reward_bounds
from tasks.rewards.limits import Bounds
from tasks.rewards.parts import check_score, reward
from tasks.stages.train.settings import episode_limits

JUDGED_BY_AGENT = passed("not asked here: without a world only what the agent itself played is judged")
NOTHING = ""  # the message of an agent that does nothing
MOST_IDLE = 24  # side by side
IDLE_SECONDS = 1.0
ROUNDING = 1e-9  # of sums of parts


def references_score(context: DoctorContext) -> Finding:
    """References of all splits and categories: success, and a reward within the bounds of a success."""
    if is_judged_by_agent(context):
        return JUDGED_BY_AGENT
    references = [item for item in context.references if context.environment.knows_solution(item.problem)]
    if not references:
        return warned(
            "nobody knows a solution of these problems, so one that cannot be solved looks like one that is hard",
            "Give the environment solutions if you can; else watch `assess`: a problem that never succeeds teaches "
            "nothing.",
        )
    bounds = _bounds(context)
    failures, outside, changing = [], [], []
    for reference in references:
        played = reference.trajectory
        if not played.is_success:
            checks = ", ".join(name for name, holds in played.checks.items() if not holds)
            failures.append(f"{reference.problem.id} of {reference.split}: {checks or played.outcome}")
            continue
        score = _score(context, reference.problem, played)
        if not _is_within(score, bounds.success_least, bounds.success_most):
            outside.append(f"{reference.problem.id}: {score.reward:g}")
        elif score != (again := _score(context, reference.problem, played)):
            changing.append(f"{reference.problem.id}: {score.reward:g}, then {again.reward:g}")
    if failures:
        return failed(
            f"{len(failures):,} of {len(references):,} references fail: {list_some(failures)}",
            "If a reference fails, the check of success cannot be trusted. Correct the reference or the check of "
            "success.",
        )
    if outside:
        return failed(
            f"{len(outside):,} rewards are outside {bounds.success_least:g} to {bounds.success_most:g}: "
            f"{list_some(outside)}",
            "Correct the part that is outside its bounds, or raise the limits of sampling that the reference exceeds.",
        )
    if changing:
        return failed(
            f"one and the same episode earns another reward when it is scored again: {list_some(changing)}",
            "A reward must depend on the episode alone: take the random numbers, the clock or the state out of your "
            "function in reward.parts.",
        )
    categories = len({reference.problem.category for reference in references})
    return passed(f"{len(references):,} from all splits, categories: {categories}")


def doing_nothing(context: DoctorContext) -> Finding:
    """An empty message to each request: no success, and a reward within the bounds of a failure. The categories of each
    split in turn, as many problems as the time allows.
    """
    assert context.references  # else nothing can be played, which is raised
    if is_judged_by_agent(context):
        return JUDGED_BY_AGENT
    bounds = _bounds(context)
    problems = [problem for _, problem in choose(context.problems, tools=[])]
    idle = list[tuple[Problem, Trajectory]]()
    for batch in batches_for(IDLE_SECONDS, problems, MOST_IDLE):
        silent = [(problem, [NOTHING] * len(problem.requests)) for problem in batch]
        idle += zip(batch, context.play(silent), strict=True)
    pairs = [(problem, played) for problem, played in idle if played.fault is None]
    for problem, played in pairs:
        score = _score(context, problem, played)
        if not played.is_success and not _is_within(score, bounds.failure_least, bounds.failure_most):
            return failed(
                f"a failure earns {score.reward:g} on {problem.id!r}",
                f"Correct the reward: by the bounds of its parts a failure earns {bounds.failure_least:g} to "
                f"{bounds.failure_most:g}, and a success {bounds.success_least:g} or more.",
            )
    solved = Counter(problem.category for problem, played in pairs if played.is_success)
    if solved:
        categories = list_some([f"{category} ({number:,})" for category, number in sorted(solved.items())])
        return warned(
            f"an empty message already succeeds on {solved.total():,} of {len(pairs):,} problems: {categories}",
            "Fine where silence is the right answer; else these were solved before, or the check of success is too "
            "weak.",
        )
    return passed(f"an empty message fails on {counted(len(pairs), 'problem')}")


def test_problems(context: DoctorContext) -> Finding:
    """As many as promotion asks for: else it refuses to decide, after the training."""
    asked, found = context.settings.promote.min_unseen_problems, len(context.problems["test"])
    if found < asked:
        remedy = more_test_problems(context.settings, context.paths)
        return failed(f"{found:,}, and promote.min_unseen_problems asks for {asked:,}", remedy)
    return passed(f"{found:,}, at least {asked:,} are asked for")


def _bounds(context: DoctorContext) -> Bounds:
    settings = context.settings
    return reward_bounds(settings.reward.unjudged(), episode_limits(settings.sampling, settings.environment))


def _is_within(score: Score, least: float, most: float) -> bool:
    return least - ROUNDING <= score.reward <= most + ROUNDING


def _score(context: DoctorContext, problem: Problem, played: Trajectory) -> Score:
    score = reward(problem, played, context.settings.reward.unjudged())
    return check_score(score, problem=problem, trajectory=played)
