"""Will training have something to learn from? Groups without signal that are expected from the baseline."""

from __future__ import annotations

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import Finding, passed, warned
from tasks.stages.train.outlook import expect, read_baseline

MOST_WITHOUT_SIGNAL = 0.75


def expected_signal(context: DoctorContext) -> Finding:
    baseline = read_baseline(context.paths)
    if baseline is None:
        return passed("unknown: no episode of the model that training starts from was played")
    train = context.settings.train
    outlook = expect(train, context.problems["train"], baseline)
    planned = outlook.row(train.group_size)
    told = (
        f"{outlook.sentence}; with train.group_size {train.group_size} about {planned.episodes:,.0f} episodes, "
        f"{planned.sampled_tokens:,.0f} sampled tokens"
    )
    if planned.without_signal <= MOST_WITHOUT_SIGNAL:
        return passed(told)
    return warned(
        told,
        f"{planned.without_signal:.0%} of the groups would teach nothing, because all their episodes succeed or all "
        f"fail. Set train.problem_sampler to band, or train.group_size to {outlook.recommended}, or bring problems of "
        f"another difficulty (curate.max_level).",
    )
