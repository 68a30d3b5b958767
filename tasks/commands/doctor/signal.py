"""Will training have something to learn from? Groups without signal that are expected from the baseline."""

from __future__ import annotations

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import Finding, passed, warned
from tasks.learning.shared.settings import GRPOSettings
from tasks.stages.train.outlook import Outlook, expect, read_baseline

MOST_WITHOUT_SIGNAL = 0.75


def expected_signal(context: DoctorContext) -> Finding:
    baseline = read_baseline(context.paths)
    if baseline is None:
        return passed("unknown: no episode of the model that training starts from was played")
    outlook = expect(context.settings.train, context.problems["train"], baseline)
    told = f"{outlook.sentence}; {outlook.planned.sentence}"
    share = outlook.planned.without_signal
    if share <= MOST_WITHOUT_SIGNAL:
        return passed(told)
    remedy = ", or ".join([*_better_settings(context.settings.train, outlook), "bring problems of another difficulty"])
    return warned(
        told,
        f"{share:.0%} of the groups would teach nothing, because all their episodes succeed or all fail. "
        f"{remedy[0].upper()}{remedy[1:]} (curate.max_level).",
    )


def _better_settings(train: GRPOSettings, outlook: Outlook) -> list[str]:
    """What could be set, but for what is set already."""
    found = [] if train.problem_sampler == "band" else ["set train.problem_sampler to band"]
    if max(outlook.planned.num_iterations) >= outlook.recommended:
        return found
    is_scheduled = train.exploration is not None and train.exploration.samples_per_problem is not None
    samples = "train.exploration.samples_per_problem up" if is_scheduled else "train.group_size"
    return [*found, f"set {samples} to {outlook.recommended}"]
