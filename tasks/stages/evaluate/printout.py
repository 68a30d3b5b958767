"""What `evaluate` prints: first how much it will play and what that can show; after the race, its table; at last,
what went wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.core.records import Problem
from tasks.core.text import counted, first_few
from tasks.measurement.points import interval_text, level_text
from tasks.stages.evaluate.racing import Race, block_ends, chance_of_losing_its_place
from tasks.stages.evaluate.settings import EvaluateSettings

if TYPE_CHECKING:
    from tasks.measurement.statistics import Result


def describe_plan(settings: EvaluateSettings, num_snapshots: int, num_select: int, test: list[Problem]) -> str:
    """How many episodes will be played, and the smallest difference that they could show."""
    from tasks.measurement.power import minimum_detectable_difference

    def smallest(success_rate: float) -> float:
        return 100 * minimum_detectable_difference(
            num_problems=len(test),
            num_groups=num_groups,
            samples_per_problem=settings.test_samples_per_problem,
            confidence=settings.confidence,
            power=settings.power,
            success_rate=success_rate,
        )

    num_groups = len({problem.split_group or problem.id for problem in test})
    is_alone = num_snapshots == 1  # then it plays all in the first round
    snapshots = counted(num_snapshots, "snapshot")
    ends = [num_select] if is_alone else block_ends(num_select, settings.racing)
    return (
        f"select: {snapshots} on {' → '.join(map(str, ends))} problems × "
        f"{settings.select_samples_per_problem}{'' if settings.racing else ' (no racing)'}\n"
        f"{_describe_racing(settings, num_snapshots, num_select)}"
        f"test: {counted(len(test), 'problem')} of {counted(num_groups, 'group')} × "
        f"{settings.test_samples_per_problem}; the smallest difference found {settings.power:.0%} of\n"
        f"      the time at {level_text(settings.confidence)} confidence is {smallest(0.5):.1f} points near 50% "
        f"success, {smallest(0.9):.1f} near 90%"
    )


def _describe_racing(settings: EvaluateSettings, num_snapshots: int, num_select: int) -> str:
    """Both ways in which racing may drop the truly best snapshot; empty where nothing can be dropped."""
    racing = settings.racing
    if racing is None or num_snapshots < 2 or len(block_ends(num_select, racing)) < 2:
        return ""
    no_place = [
        chance_of_losing_its_place(
            racing,
            lead=lead,
            num_snapshots=num_snapshots,
            num_problems=num_select,
            samples=settings.select_samples_per_problem,
            success_rate=0.9,
        )
        for lead in (0.01, 0.03)
    ]
    return (
        f"      racing drops the best as worse in at most {racing.error_rate:.0%}, for want of a\n"
        f"      place in {no_place[0]:.0%} if it leads by 1 point near 90% success, in {no_place[1]:.0%} if by 3\n"
    )


def diagnose(test: Mapping[str, Any], gain: Mapping[str, Any]) -> list[str]:
    """What went wrong, by the results on test and the gain over the warm start: one sentence each."""
    now, then = (_rates(test[name]) for name in ("best", "warm_start"))
    never = [name for name, rate in sorted(now.items()) if rate == 0]
    found = []
    if gain["ci_high"] < 0:
        change = {name: rate - then.get(name, rate) for name, rate in now.items()}
        lost = [name for name in sorted(change, key=lambda name: change[name]) if change[name] < 0]
        most = first_few([f"{name} ({then[name]:.1%} → {now[name]:.1%})" for name in lost])
        found.append(
            f"training made it worse: on test the best snapshot solves {test['best']['success_rate']:.1%}, the warm "
            f"start {test['warm_start']['success_rate']:.1%} ({interval_text(gain)} points). Most was lost in {most}. "
            f"The progress chart shows where it began; lower train.learning_rate, or raise train.kl_weight."
        )
    if never:
        found.append(
            f"the best snapshot never succeeds in {first_few(never)}. The data card shows whether train "
            f"and the demonstrations have any of it, and the report what its episodes do."
        )
    return found


def _rates(result: Mapping[str, Any]) -> dict[str, float]:
    return {name: row["success_rate"] for name, row in result["by_category"].items()}


def print_race(outcome: Race, on_select: dict[str, Result]) -> None:
    """The snapshots as a table: success where they were measured, and how the race ended for each."""
    from rich import box
    from rich.table import Table

    from tasks.core.console import SafeConsole

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for number, column in enumerate(("Snapshot", "success", "interval", "problems", "race")):
        table.add_column(column, justify="left" if number in (0, 4) else "right", no_wrap=True)
    for name, result in on_select.items():
        rate, low, high = (f"{100 * result[key]:.1f}" for key in ("success_rate", "ci_low", "ci_high"))
        fate = "best" if name == outcome.winner else ""
        if why := outcome.dropped.get(name):
            reason = why["reason"].replace("_", " ")
            fate = f"{reason} in round {why['round']}, −{100 * why['behind']:.1f} points"
        style = "bold green" if name == outcome.winner else "dim" if name in outcome.dropped else None
        table.add_row(name, f"{rate}%", f"{low}–{high}", str(result["num_problems"]), fate, style=style)
    SafeConsole().print(table)
