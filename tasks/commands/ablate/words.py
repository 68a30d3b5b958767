"""What an ablation says, as Markdown and as a table in a terminal, with the sentences both share.

Takes what `ablation.compare` makes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.ablate.results import BASE
from tasks.report.results import interval, percent
from tasks.report.summary import new_table

if TYPE_CHECKING:
    from rich.text import Text

    from tasks.core.console import SafeConsole


def markdown(results: dict[str, Any]) -> str:
    """table.md: what was compared, the table, every single run, and how far the numbers carry."""
    name = f"{results['confidence']:.0%} interval"
    head = ["variant", "changed", "success", name, "against base", "tokens", "overlong", "stopped"]
    rows = [
        [
            variant["label"],
            "<br>".join(variant["changes"]) or "–",
            percent(variant["result"]["success_rate"]),
            interval(variant["result"]),
            points(variant["difference"]),
            f"{variant['result']['mean_sampled_tokens']:.1f}",
            percent(variant["result"]["outcomes"]["overlong"]),
            stopped(variant),
        ]
        for variant in results["variants"]
    ]
    run_head = ["variant", "seed", "iterations", "last snapshot", "success", name, "tokens", "the sentinel"]
    run_rows = [
        [
            variant["label"],
            str(run["seed"]),
            str(run["num_iterations"]),
            run["snapshot"],
            percent(run["success_rate"]),
            interval(run),
            f"{run['mean_sampled_tokens']:.1f}",
            _what_the_sentinel_did(run) or "–",
        ]
        for variant in results["variants"]
        for run in variant["runs"]
    ]
    parts = [
        *("# Ablation", what_was_compared(results), what_was_measured(results), _pipes(head, rows)),
        *("## Each run", _pipes(run_head, run_rows), *caveats(results), *advice(results)),
    ]
    return "\n\n".join(parts) + "\n"


def print_ablation(results: dict[str, Any], places: dict[str, Path], console: SafeConsole) -> None:
    """The table in one screen, alarms in words, and where the files are; reads well at 80 columns."""
    table = new_table("Ablation", "success", "interval", "against base", "tokens", "stopped")
    for variant in results["variants"]:
        result = variant["result"]
        table.add_row(
            variant["label"],
            percent(result["success_rate"]),
            interval(result),
            _coloured(variant["difference"]),
            f"{result['mean_sampled_tokens']:.1f}",
            stopped(variant),
            style="bold" if variant["name"] == BASE else None,
        )
    console.print(table)
    console.print()
    lines = [
        what_was_compared(results),
        what_was_measured(results),
        *_alarms(results),
        *caveats(results),
        *advice(results),
    ]
    for line in lines:
        text = textwrap.fill(line, console.width, initial_indent="· ", subsequent_indent="  ")
        console.print(text)
    console.print()
    for name, place in places.items():
        console.print(f"{name:<12}{place}", soft_wrap=True)


def what_was_compared(results: dict[str, Any]) -> str:
    """Two sentences: what the base is, and how long each run was."""
    seeds = sorted({run["seed"] for variant in results["variants"] for run in variant["runs"]})
    return (
        f"Base: {results['about_base']}. Each run: {results['num_iterations']} iterations from the same warm start, "
        f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}."
    )


def what_was_measured(results: dict[str, Any]) -> str:
    """What the columns are of, and in what unit differences are."""
    num_problems = results["variants"][0]["result"]["num_problems"]
    return (
        f"Measured: the last snapshot on the {num_problems} problems of {results['split']}; "
        f"{results['confidence']:.0%} intervals, differences in points and paired problem by problem, sampled tokens "
        f"an episode."
    )


def caveats(results: dict[str, Any]) -> list[str]:
    """What the intervals do not say, in sentences."""
    most = max(len(variant["runs"]) for variant in results["variants"])
    if most == 1:
        lines = [
            "One training seed each: an interval says what other problems would change, not what another seed would."
        ]
    else:
        lines = ["Seeds are pooled: an interval says what other problems would change; the runs show how seeds differ."]
    if not any(variant["name"] == BASE for variant in results["variants"]):
        lines.append("The base is not among them, so there is nothing to compare with.")
    lines += [
        f"{variant['label']} trained like {variant['same_as']}, number for number: the change never came into play."
        for variant in results["variants"]
        if variant["same_as"]
    ]
    compared = sum(variant["difference"] is not None for variant in results["variants"])
    if compared > 1:
        by_luck = 1 - results["confidence"] ** compared
        lines.append(
            f"{compared} comparisons at {results['confidence']:.0%} each: even if nothing mattered, up to "
            f"{by_luck:.0%} of such tables would show a difference."
        )
    return lines


def advice(results: dict[str, Any]) -> list[str]:
    """What to run next to know more."""
    runs = [variant["runs"] for variant in results["variants"]]
    return [
        *(["`--only base` adds the base."] if not any(item["name"] == BASE for item in results["variants"]) else []),
        *(["`--seeds 3` asks what another seed would change."] if max(map(len, runs)) == 1 else []),
    ]


def points(difference: dict[str, Any] | None) -> str:
    """A difference and its interval in percentage points: `+0.4 (−1.2, +2.0)`; a dash where there is none."""
    if difference is None:
        return "–"
    middle, low, high = (_signed(difference[key]) for key in ("difference", "ci_low", "ci_high"))
    return f"{middle} ({low}, {high})"


def stopped(variant: dict[str, Any]) -> str:
    """What the sentinel did to its runs: `at 41`, of several runs `2 of 3`, or a dash."""
    iterations = [run["alarm"]["iteration"] for run in variant["runs"] if run["alarm"]]
    if not iterations:
        return "–"
    return f"at {iterations[0]}" if len(variant["runs"]) == 1 else f"{len(iterations)} of {len(variant['runs'])}"


def _signed(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def _coloured(difference: dict[str, Any] | None) -> Text:
    """Green or red where the interval leaves no doubt about the sign."""
    from rich.text import Text

    style = ""
    if difference is not None and difference["ci_low"] > 0:
        style = "green"
    elif difference is not None and difference["ci_high"] < 0:
        style = "red"
    return Text(points(difference), style=style)


def _alarms(results: dict[str, Any]) -> list[str]:
    return [
        f"{variant['label']}, seed {run['seed']}: {words} Measured: {run['snapshot']}."
        for variant in results["variants"]
        for run in variant["runs"]
        if (words := _what_the_sentinel_did(run))
    ]


def _what_the_sentinel_did(run: dict[str, Any]) -> str:
    """In sentences; empty where it never had a reason to."""
    back = ", ".join(map(str, run["rolled_back_at"]))
    sentences = [f"rolled back at iteration {back}."] if back else []
    if run["alarm"]:
        sentences.append(f"stopped at iteration {run['alarm']['iteration']}: {run['alarm']['reason']}")
    return " ".join(sentences)


def _pipes(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
