"""Checks of success and reward: references score 1, doing nothing does not, and no reward is out of its range."""

from __future__ import annotations

from tasks.commands.doctor.context import Case
from tasks.commands.doctor.findings import Finding, failed, passed, some, warned
from tasks.core.records import Problem, Score, Trajectory
from tasks.rewards.parts import check_score, reward
from tasks.rewards.settings import OUTCOME_GAP

NOTHING = ""  # the message of an agent that does nothing
MOST_IDLE = 24


def references_score(case: Case) -> Finding:
    """References of all splits and types: success, and a reward from 1 to the most that `reward` allows."""
    references = case.references
    failures, outside = [], []
    for golden in references:
        played = golden.trajectory
        if not played.is_success:
            checks = ", ".join(name for name, holds in played.checks.items() if not holds)
            failures.append(f"{golden.problem.id} of {golden.split}: {checks or played.outcome}")
        elif not OUTCOME_GAP <= (score := _score(case, golden.problem, played)).reward <= most_reward(case):
            outside.append(f"{golden.problem.id}: {score.reward:g}")
    if failures:
        return failed(
            f"{len(failures):,} of {len(references):,} references fail: {some(failures)}",
            "A success nobody can show is a signal nobody can trust. Correct the reference or the check of success.",
        )
    if outside:
        return failed(
            f"{len(outside):,} rewards lie outside {OUTCOME_GAP:g} to {most_reward(case):g}: {some(outside)}",
            "Correct the reward: a part may add, and must never outweigh success.",
        )
    types = len({golden.problem.category for golden in references})
    return passed(f"{len(references):,} from all splits, types: {types}")


def doing_nothing(case: Case) -> Finding:
    """An empty message at once: no success, and a reward below that of any success."""
    chosen = {golden.problem.category: golden for golden in reversed(case.references)}
    goldens = [*chosen.values()][:MOST_IDLE]
    played = case.play([(golden.problem, [NOTHING]) for golden in goldens])
    pairs = [(golden, idle) for golden, idle in zip(goldens, played, strict=True) if idle.fault is None]
    for golden, idle in pairs:
        score = _score(case, golden.problem, idle)
        if not idle.is_success and not 0 <= score.reward < OUTCOME_GAP:
            return failed(
                f"a failure earns {score.reward:g} on {golden.problem.id!r}",
                f"Correct the reward: a failure must earn from 0 to less than {OUTCOME_GAP:g}.",
            )
    solved = sorted(golden.problem.category for golden, idle in pairs if idle.is_success)
    if solved:
        return warned(
            f"an empty message already succeeds on {len(solved)} of {len(pairs)} types: {some(solved)}",
            "Fine where silence is the right answer; else the check of success asks for too little.",
        )
    return passed(f"an empty message fails, types: {len(pairs)}")


def most_reward(case: Case) -> float:
    return OUTCOME_GAP + case.settings.reward.format_weight + case.settings.reward.execution_weight


def _score(case: Case, problem: Problem, played: Trajectory) -> Score:
    score = reward(problem, played, case.settings.reward)
    return check_score(score, reward_name="reward", problem=problem, trajectory=played)
