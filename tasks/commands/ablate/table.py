"""The results of an ablation: every variant beside the base on the same problems, in numbers and as tables.

Success is the mean over problems of the mean over seeds. Intervals say what other *problems* would change, not another
training seed, so each run is listed too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.ablate.variants import BASE, Variant
from tasks.commands.compare import STYLES, compare_each, p_text
from tasks.core.records import Trajectory
from tasks.core.text import counted
from tasks.core.workspace import as_shell_sees
from tasks.measurement.points import level_text
from tasks.measurement.statistics import summarise
from tasks.report.results import interval, percent
from tasks.report.summary import new_table

if TYPE_CHECKING:
    from tasks.core.console import SafeConsole

WARM_START = "warm start"  # what a run measured that was stopped before its first snapshot
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class VariantRun:
    seed: int
    training: list[Row]
    alarm: Row | None  # iteration, signal and reason
    snapshot: str
    trajectories: list[Trajectory]


def compare_variants(runs: Mapping[Variant, Sequence[VariantRun]], *, confidence: float) -> Row:
    """The content of results.json. `difference` is null for the base, and where no run of it has the same seed or one
    of the two was trained in none; `same_as` is an earlier variant with exactly equal metrics, for which a difference
    of 0.0 is no evidence.
    """
    base = next((mine for variant, mine in runs.items() if variant.name == BASE), [])
    sides = {
        variant.name: pair
        for variant, mine in runs.items()
        if variant.name != BASE and all(pair := _on_shared_seeds(base, mine))
    }
    differences, confidence_of_each = compare_each(sides, confidence=confidence)
    first = next(iter(runs))
    changed = dict.fromkeys(change.partition(" → ")[0] for variant in runs for change in variant.changes)
    return {
        "about_base": ", ".join(changed) or "params.yaml",
        "confidence": confidence,
        "confidence_of_each": confidence_of_each,
        "num_iterations": first.settings.train.num_iterations,
        "split": "select",
        "variants": [
            {
                "name": variant.name,
                "changes": variant.changes,
                "result": dict(summarise(_pool(mine), confidence=confidence)),
                "difference": differences.get(variant.name),
                "same_as": _trained_alike(variant, runs),
                "runs": [_describe_run(run, confidence) for run in mine],
            }
            for variant, mine in runs.items()
        ],
    }


def _pool(runs: Sequence[VariantRun]) -> list[Trajectory]:
    return [trajectory for run in runs for trajectory in run.trajectories]


def _on_shared_seeds(
    base: Sequence[VariantRun], runs: Sequence[VariantRun]
) -> tuple[list[Trajectory], list[Trajectory]]:
    """The episodes of the seeds that both have: another seed of the base would add its luck to the comparison. None
    where one of the two was trained with none of them: that would compare the untrained warm start.
    """
    shared = {run.seed for run in base} & {run.seed for run in runs}
    first, second = ([run for run in side if run.seed in shared] for side in (base, runs))
    if any(all(run.snapshot == WARM_START for run in side) for side in (first, second)):
        return [], []
    return _pool(first), _pool(second)


def _trained_alike(variant: Variant, runs: Mapping[Variant, Sequence[VariantRun]]) -> str | None:
    trained = {other: {run.seed: run.training for run in mine} for other, mine in runs.items()}
    earlier = list(runs)[: list(runs).index(variant)]
    return next((other.name for other in earlier if trained[other] == trained[variant]), None)


def _describe_run(run: VariantRun, confidence: float) -> Row:
    result = summarise(run.trajectories, confidence=confidence)
    return {
        "seed": run.seed,
        "num_iterations": len(run.training),
        "snapshot": run.snapshot,
        "alarm": run.alarm,
        "rolled_back_at": [row["iteration"] for row in run.training if "rolled_back_to" in row],
        **{key: result[key] for key in ("success_rate", "ci_low", "ci_high", "mean_sampled_tokens")},
    }


def markdown(results: Row) -> str:
    """The text of table.md."""
    shared = ("success", f"{level_text(results['confidence'])} interval", "tokens")
    rows = [
        [
            row_name(variant),
            ", ".join(variant["changes"]) or "–",
            *_numbers(variant["result"]),
            points(variant["difference"]),
            _p(variant["difference"]),
            percent(variant["result"]["outcomes"]["overlong"]),
            stopped(variant),
        ]
        for variant in results["variants"]
    ]
    each = [
        [
            variant["name"],
            str(run["seed"]),
            str(run["num_iterations"]),
            run["snapshot"],
            *_numbers(run),
            _sentinel_did(run) or "–",
        ]
        for variant in results["variants"]
        for run in variant["runs"]
    ]
    parts = [
        *("# Ablation", *what_was_compared(results)),
        _pipes(["variant", "changed", *shared, "against base", "p, adjusted by Holm", "overlong", "stopped"], rows),
        "## Each run",
        _pipes(["variant", "seed", "iterations", "last snapshot", *shared, "the sentinel"], each),
        *caveats(results),
    ]
    return "\n\n".join(parts) + "\n"


def print_ablation(results: Row, places: dict[str, Path], console: SafeConsole) -> None:
    from rich.text import Text

    table = new_table("Ablation", "success", "interval", "tokens", "against base", "p, Holm")
    for variant in results["variants"]:
        difference = variant["difference"]
        colored = Text(points(difference), STYLES[difference["word"]] if difference else "")
        numbers, style = _numbers(variant["result"]), "bold" if variant["name"] == BASE else None
        table.add_row(row_name(variant), *numbers, colored, _p(difference), style=style)
    console.print(table)
    console.print()
    alarms = [
        f"{variant['name']}, seed {run['seed']}: {told} Measured: {run['snapshot']}."
        for variant in results["variants"]
        for run in variant["runs"]
        if (told := _sentinel_did(run))
    ]
    for line in (*what_was_compared(results), *alarms, *caveats(results)):
        console.print(textwrap.fill(line, console.width, initial_indent="· ", subsequent_indent="  "))
    console.print()
    for name, place in places.items():
        console.print(f"{name:<12}{as_shell_sees(place)}", soft_wrap=True)


def what_was_compared(results: Row) -> list[str]:
    seeds = sorted({run["seed"] for variant in results["variants"] for run in variant["runs"]})
    num_problems = results["variants"][0]["result"]["num_problems"]
    return [
        f"Base: {results['about_base']}. Each run: {counted(results['num_iterations'], 'iteration')} from the same "
        f"warm start, {'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}.",
        f"Measured: the last snapshot on the {num_problems} problems of {results['split']}; "
        f"{level_text(results['confidence'])} intervals, differences in points and paired problem by problem, sampled "
        f"tokens per episode.",
    ]


def caveats(results: Row) -> list[str]:
    """What the intervals do not cover, and what to run next to know more."""
    variants = results["variants"]
    if max(len(variant["runs"]) for variant in variants) == 1:
        lines = [
            "One training seed each: an interval says what other problems would change, not what another seed would. "
            "Run again with `--seeds 3` for that."
        ]
    else:
        lines = ["Seeds are pooled: an interval says what other problems would change; the runs show how seeds differ."]
    if not any(variant["name"] == BASE for variant in variants):
        lines.append(
            "Nothing is compared, since the base is not among them. Add `--only base`; finished runs are kept."
        )
    lines += [
        f"{variant['name']} trained like {variant['same_as']}, with exactly the same numbers: the change had no effect."
        for variant in variants
        if variant["same_as"]
    ]
    lines += [
        f"{row_name(variant)}: stopped before the first snapshot, so the untrained model was measured."
        for variant in variants
        if num_untrained(variant)
    ]
    compared = sum(variant["difference"] is not None for variant in variants)
    if compared > 1:
        lines.append(
            f"The intervals of the {compared} differences are joint (each at "
            f"{level_text(results['confidence_of_each'])})."
        )
    return lines


def row_name(variant: Row) -> str:
    """The variant, with how much of its row is the warm start and no result of training."""
    name, untrained, seeds = str(variant["name"]), num_untrained(variant), len(variant["runs"])
    if untrained == 0:
        return name
    return f"{name} ({WARM_START})" if untrained == seeds else f"{name} ({WARM_START} in {untrained} of {seeds} seeds)"


def num_untrained(variant: Row) -> int:
    return sum(run["snapshot"] == WARM_START for run in variant["runs"])


def points(difference: Row | None) -> str:
    """A difference and its interval in percentage points: `+0.4 (−1.2, +2.0)`; a dash where there is none."""
    if difference is None:
        return "–"
    middle, low, high = (_signed(difference[key]) for key in ("difference", "ci_low", "ci_high"))
    return f"{middle} ({low}, {high})"


def _p(difference: Row | None) -> str:
    return "–" if difference is None else p_text(difference)


def stopped(variant: Row) -> str:
    iterations = [run["alarm"]["iteration"] for run in variant["runs"] if run["alarm"]]
    if not iterations:
        return "–"
    return f"at {iterations[0]}" if len(variant["runs"]) == 1 else f"{len(iterations)} of {len(variant['runs'])}"


def _numbers(result: Row) -> list[str]:
    return [percent(result["success_rate"]), interval(result), f"{result['mean_sampled_tokens']:.1f}"]


def _signed(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def _sentinel_did(run: Row) -> str:
    back = ", ".join(map(str, run["rolled_back_at"]))
    sentences = [f"rolled back at iteration {back}."] if back else []
    if run["alarm"]:
        sentences.append(f"stopped at iteration {run['alarm']['iteration']}: {run['alarm']['reason']}")
    return " ".join(sentences)


def _pipes(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
