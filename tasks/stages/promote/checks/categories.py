"""Whether a challenger loses success in some category. Three checks, since categories are many and small:

    falls       evidence of a fall (two-sided p-values, Holm): at most 1 − confidence of equal challengers are accused
                of one. Speaks against the challenger.
    loses       a loss of more than `max_loss`, with less evidence: one-sided p-values at a level at which at most
                `false_alarm` of equal challengers are held for any. Holds.
    never_fall  the categories named in params must show by evidence that they lose less than `max_loss`. Holds.

The level uses that these tests are discrete: a category uses no more of the error than it can, and one that cannot
raise an alarm none. With 40 problems of two episodes each a fall from 98 to 88% is found in three of four cases, where
Holm's at 95% finds one in ten (tests/simulations/categories.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tasks.core.json_diff import listed, shown_name
from tasks.measurement.points import level_text, points_text
from tasks.measurement.power import detectable_change
from tasks.measurement.significance import family_level, holm, possible_p_values, sign_flip_p_values
from tasks.measurement.statistics import (
    compare_success,
    non_inferiority_p_value,
    paired_steps,
    success_by_problem,
    summarise,
    sums_by_group,
)
from tasks.stages.promote.checks.check import Check, p_text
from tasks.stages.promote.checks.lost_episodes import Sides
from tasks.stages.promote.settings import CategorySettings


def refuse_unknown_categories(options: CategorySettings, known: Collection[str]) -> None:
    unknown = [name for name in options.never_fall if name not in known]
    if unknown:
        shown = listed([repr(shown_name(name)) for name in unknown])
        raise ValueError(
            f"promote.categories.never_fall names {shown}, and no test problem is of such a category, so nothing would "
            f"guard it. Name some of: {', '.join(shown_name(name) for name in sorted(known))}."
        )


def check_categories(options: CategorySettings, sides: Sides, *, confidence: float, power: float) -> list[Check]:
    """The check of all categories, and of those in params. A single category is left to the other checks."""
    parts = sides.by_category()
    if len(parts) == 1 and not options.never_fall:
        numbers: dict[str, Any] = {"confidence": confidence, "by_category": {}, "falling": [], "losing": []}
        sentence = "All problems are of one category, so none falls by itself."
        return [Check("categories", True, False, sentence, numbers)]
    rows = category_rows(options, parts, confidence=confidence, power=power)
    together = check_together(options, rows, confidence=confidence, power=power)
    return [together, check_never_fall(options, rows)] if options.never_fall else [together]


def category_rows(
    options: CategorySettings, parts: Mapping[str, Sides], *, confidence: float, power: float
) -> dict[str, dict[str, Any]]:
    """Every number of each category, as measured; `worst_case` counts lost episodes."""
    of_interval = 1 - (1 - confidence) / len(parts)  # Bonferroni's
    rows = {name: _row(part, options, of_interval) for name, part in parts.items()}
    # A rise is no fall: Holm must not rank its p-value.
    falls = holm({name: row["p_value"] if row["difference"] < 0 else 1.0 for name, row in rows.items()})
    level = family_level([row.pop("possible") for row in rows.values()], options.false_alarm)
    for name, row in rows.items():
        row["p_of_fall"] = round(falls[name], 6)
        row["falls"] = row["is_measured"] and falls[name] <= 1 - confidence
        row["level"] = round(level, 6)
        row["loses"] = row["worst_case"]["difference"] < -options.max_loss and row["p_of_loss"] <= level
        row["detectable_loss"] = detectable_change(
            "loss",
            num_problems=row["num_problems"],
            samples_per_problem=row["samples_per_problem"],
            level=level,
            power=power,
            success_rate=row["other"],
            num_groups=row["num_groups"],
        )
        if name in options.never_fall:
            row["p_within_loss"] = _p_within(parts[name], options.max_loss)
            row["is_shown"] = row["p_within_loss"] <= (1 - confidence) / 2
    return rows


def check_together(
    options: CategorySettings, rows: Mapping[str, Mapping[str, Any]], *, confidence: float, power: float
) -> Check:
    falling = [name for name, row in rows.items() if row["falls"]]
    losing = [name for name, row in rows.items() if row["loses"] and not row["falls"]]
    if falling:
        what = "category falls" if len(falling) == 1 else "categories fall"
        told = "; ".join(f"{_change(name, rows[name])}, {p_text(rows[name]['p_of_fall'])}" for name in falling)
        sentence = f"{len(falling)} {what} with evidence (Holm over {len(rows)}): {told}."
    elif losing:
        what = "category seems" if len(losing) == 1 else "categories seem"
        told = "; ".join(f"{_change(name, rows[name])}, {p_text(rows[name]['p_of_loss'])}" for name in losing)
        sentence = (
            f"{len(losing)} {what} to lose more than {points_text(options.max_loss)}: {told} (at most "
            f"{level_text(options.false_alarm)} of equal challengers are held for any)."
        )
    else:
        sentence = f"No category is seen to lose more than {points_text(options.max_loss)}; {_reach_text(rows, power)}."
    numbers = {
        "confidence": round(1 - (1 - confidence) / len(rows), 6),
        "power": power,
        **options.model_dump(mode="json"),
        "by_category": {name: dict(row) for name, row in rows.items()},
        "falling": falling,
        "losing": losing,
    }
    return Check("categories", not falling and not losing, bool(falling), sentence, numbers)


def check_never_fall(options: CategorySettings, rows: Mapping[str, Mapping[str, Any]]) -> Check:
    """For a category without problems left to compare on, nothing is shown."""
    told = "; ".join(
        f"{_change(name, rows[name])}, {p_text(rows[name]['p_within_loss'])}"
        if name in rows
        else f"{shown_name(name)}: –"
        for name in options.never_fall
    )
    missing = [name for name in options.never_fall if name not in rows or not rows[name]["is_shown"]]
    evidence = f"evidence of losing less than {points_text(options.max_loss)}"
    if missing:
        evidence = f"no {evidence} in {listed([shown_name(name) for name in missing])}"
    sentence = f"Of what may never fall ({told}): {evidence}."
    return Check("never_fall", not missing, False, sentence, {"max_loss": options.max_loss, "missing": missing})


def _row(part: Sides, options: CategorySettings, of_interval: float) -> dict[str, Any]:
    worst = part.in_the_worst_case()
    shown = part if part.share_problem() else worst
    ours, theirs = (success_by_problem(side) for side in (worst.challenger, worst.other))
    steps, unit, labels = paired_steps(theirs, ours, part.groups)  # what is lost counts up
    sums = sums_by_group(steps, labels)
    too_much = options.max_loss * unit * len(steps) / len(sums)  # mean of a group's sum
    results = [summarise(side, confidence=of_interval) for side in (shown.challenger, shown.other)]
    return {
        **shown.compare(confidence=of_interval),
        "challenger": results[0]["success_rate"],
        "other": results[1]["success_rate"],
        "samples_per_problem": results[0]["samples_per_problem"],
        "is_measured": shown is part,
        "num_lost": list(part.num_lost),
        "worst_case": dict(compare_success(ours, theirs, part.groups, confidence=of_interval)),
        "p_of_loss": float(f"{sign_flip_p_values(sums).greater:.6g}"),
        "possible": possible_p_values(sums, above=too_much),
    }


def _p_within(part: Sides, margin: float) -> float:
    worst = part.in_the_worst_case()
    ours, theirs = (success_by_problem(side) for side in (worst.challenger, worst.other))
    return non_inferiority_p_value(ours, theirs, part.groups, margin=margin)


def _change(name: str, row: Mapping[str, Any]) -> str:
    lost = sum(row["num_lost"])
    return f"{shown_name(name)} {row['other']:.1%} → {row['challenger']:.1%}" + (f" ({lost} lost)" if lost else "")


def _reach_text(rows: Mapping[str, Mapping[str, Any]], power: float) -> str:
    seen = {name: row["detectable_loss"] for name, row in rows.items()}
    finite = {name: loss for name, loss in seen.items() if loss is not None}
    blind = len(seen) - len(finite)
    if not finite:
        return f"no loss would be seen {level_text(power)} of the time, so small are they"
    best, worst = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
    told = f"a loss is seen {level_text(power)} of the time from {100 * finite[best]:.1f}"
    if worst != best:
        told += f" ({shown_name(best)}) to {100 * finite[worst]:.1f} points ({shown_name(worst)})"
    else:
        told += f" points ({shown_name(best)})"
    return told + (f", and in {blind} of {len(seen)} never" if blind else "")
