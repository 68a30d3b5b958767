"""Checks of success and reward: references score 1, doing nothing does not, and no reward is out of its range."""

from __future__ import annotations

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import Finding, failed, list_some, passed, warned
from tasks.core.records import Problem, Score, Trajectory
from tasks.rewards.parts import check_score, reward
from tasks.rewards.settings import OUTCOME_GAP

NOTHING = ""  # the message of an agent that does nothing
MOST_IDLE = 24


def references_score(context: DoctorContext) -> Finding:
    """References of all splits and categories: success, and a reward from 1 to the most that `reward` allows."""
    references = context.references
    most = context.settings.reward.most
    failures, outside = [], []
    for reference in references:
        played = reference.trajectory
        if not played.is_success:
            checks = ", ".join(name for name, holds in played.checks.items() if not holds)
            failures.append(f"{reference.problem.id} of {reference.split}: {checks or played.outcome}")
        elif not OUTCOME_GAP <= (score := _score(context, reference.problem, played)).reward <= most:
            outside.append(f"{reference.problem.id}: {score.reward:g}")
    if failures:
        return failed(
            f"{len(failures):,} of {len(references):,} references fail: {list_some(failures)}",
            "If a reference fails, the check of success cannot be trusted. Correct the reference or the check of "
            "success.",
        )
    if outside:
        return failed(
            f"{len(outside):,} rewards are outside {OUTCOME_GAP:g} to {most:g}: {list_some(outside)}",
            "Correct the reward: a part may add to success, but never outweigh it.",
        )
    categories = len({reference.problem.category for reference in references})
    return passed(f"{len(references):,} from all splits, categories: {categories}")


def doing_nothing(context: DoctorContext) -> Finding:
    """An empty message at once: no success, and a reward below that of any success."""
    chosen = {reference.problem.category: reference.problem for reference in reversed(context.references)}
    problems = [*chosen.values()][:MOST_IDLE]
    played = context.play([(problem, [NOTHING]) for problem in problems])
    pairs = [(problem, idle) for problem, idle in zip(problems, played, strict=True) if idle.fault is None]
    for problem, idle in pairs:
        score = _score(context, problem, idle)
        if not idle.is_success and not 0 <= score.reward < OUTCOME_GAP:
            return failed(
                f"a failure earns {score.reward:g} on {problem.id!r}",
                f"Correct the reward: a failure must earn from 0 to less than {OUTCOME_GAP:g}.",
            )
    solved = sorted(problem.category for problem, idle in pairs if idle.is_success)
    if solved:
        return warned(
            f"an empty message already succeeds on {len(solved)} of {len(pairs)} categories: {list_some(solved)}",
            "Fine where silence is the right answer; else the check of success is too weak.",
        )
    return passed(f"an empty message fails, categories: {len(pairs)}")


def _score(context: DoctorContext, problem: Problem, played: Trajectory) -> Score:
    score = reward(problem, played, context.settings.reward)
    return check_score(score, reward_name="reward", problem=problem, trajectory=played)
