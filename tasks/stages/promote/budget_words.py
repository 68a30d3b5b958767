"""What a decision spent of the error of a year, and how often its test problems were looked at, in sentences.

For the terminal, the page and the warnings of decision.json; the numbers are `error_budget` and `test_set` of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def looks_text(test_set: Mapping[str, Any]) -> str:
    """How often its problems were looked at."""
    again = "" if test_set["is_new_decision"] else " (this decision was taken before, and counts once)"
    return (
        f"Test set {test_set['hash'][:12]}: its problems were looked at {times(test_set['median_looks'])}{again}; "
        f"after {test_set['max_looks']} looks they are worn."
    )


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def budget_text(budget: Mapping[str, Any]) -> str:
    """What a decision spent of the error of a year, and what is left."""
    spent, left = percent_text(budget["spent"]), percent_text(budget["left"])
    this = {
        "first": "The first champion spends no error",
        "forced": "A forced promotion spends no error",
        "against the champion": f"This decision may be wrong with a chance of {percent_text(budget['this_decision'])}",
    }[budget["kind"]]
    renews = f"; the oldest is given back on {budget['renews_at'][:10]}" if budget["renews_at"] else ""
    return (
        f"{this}. Of {percent_text(budget['per_year'])} within {budget['window_days']} days {spent} are spent, {left} "
        f"are left{renews}."
    )


def percent_text(share: float) -> str:
    """Two digits that count: 0.000274 is 0.027%, 0.9973 is 100%."""
    return f"{float(f'{100 * share:.2g}'):g}%"


def warnings_of(rows: Mapping[str, Any]) -> list[str]:
    """What a person should know: that problems are worn, or that a decision gets less error than its share."""
    test_set, budget = rows["test_set"], rows["error_budget"]
    warnings = []
    if test_set["median_looks"] > test_set["max_looks"]:
        warnings.append(
            f"More than half of the test problems were looked at {times(test_set['median_looks'])} or more, and "
            f"promote.max_looks_per_problem is {test_set['max_looks']}: whoever keeps what did well on them fits these "
            f"very problems in the end. Raise curate.test_rotation for fresh ones, or bring new ones."
        )
    if 0 < budget["this_decision"] < budget["share"]:
        warnings.append(
            f"{budget['num_decisions']} decisions within {budget['window_days']} days leave this one an error of "
            f"{percent_text(budget['this_decision'])} instead of {percent_text(budget['share'])}, so it finds only "
            f"larger differences; the oldest is given back on {budget['renews_at'][:10]}. Decide less often, or raise "
            f"promote.error_budget.decisions_per_year ({budget['planned']})."
        )
    return warnings
