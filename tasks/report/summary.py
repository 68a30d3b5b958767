"""The run on one screen: summary.json for programs; a table, the verdict and the paths for people.

Rates are on `test`, except `select`, by which the snapshot was chosen. A number that nobody measured is null, never 0.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import read_json
from tasks.core.settings import Paths
from tasks.core.stages import STAGES
from tasks.core.text import printable
from tasks.core.workspace import as_shell_sees
from tasks.measurement.points import difference_text
from tasks.report.results import (
    POLICIES,
    StoredResults,
    interval,
    percent,
    rate_of_category,
    read_results,
    short_name,
)
from tasks.tracking.settings import SQLITE

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from tasks.core.console import SafeConsole

SHARED_NUMBERS = ("success_rate", "ci_low", "ci_high", "num_problems", "samples_per_problem")
BY_HAND = {"force": "forced", "approve": "approved"}  # kinds of override that promote


def build_summary(paths: Paths) -> dict[str, Any]:
    """The content of summary.json (keys: README.md beside this file). ValueError without an evaluation."""
    results = read_results(paths)
    best = results.test["best"]
    seconds = results.run.get("seconds") or {}
    baselines = {name: _shared(result) for name, result in results.baselines.items()}
    greedy = {name: _shared(result) for name, result in results.greedy.items()}
    summary: dict[str, Any] = {
        "baseline": _shared(results.test["base"]),
        "warm_start": _shared(results.test["warm_start"]),
        "select": {
            **_shared(results.evaluation["select"][results.best_snapshot]),
            "snapshot": results.best_snapshot,
        },
        "test": {
            **_shared(best),
            "by_category": {category: best["by_category"][category]["success_rate"] for category in results.categories},
        },
        **({"baselines": baselines} if baselines else {}),
        **({"greedy": greedy} if greedy else {}),
        **({"sharded": _sharded(results.sharded)} if results.sharded else {}),
        **({"warm_start_best_of_k": results.best_of_k} if results.best_of_k else {}),
        **({"warm_start_attempts": [_attempt(row) for row in results.attempts]} if results.attempts else {}),
        **({"also": {name: _elsewhere(row) for name, row in results.also.items()}} if results.also else {}),
        **({"reflexion": _tried_again(results.reflexion)} if results.reflexion else {}),
        "champion": results.champion,
        "seconds": {name: seconds.get(name) for name in (*STAGES, "total")},
    }
    if results.untrained is not None:
        summary["untrained"] = results.untrained
    if results.frontier is not None:
        usage = {f"{name}_per_episode": value for name, value in results.frontier["usage_per_episode"].items()}
        summary["frontier"] = {"model": results.frontier["model"], **_shared(results.frontier["result"]), **usage}
    return summary


def _attempt(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("success", "num_steps", "end", "learning_rate", "is_kept")}


def _elsewhere(row: dict[str, Any]) -> dict[str, Any]:
    results = {policy: _shared(row["results"][policy]) for policy in POLICIES}
    return {**results, "gain": {name: row["gain"][name] for name in ("difference", "ci_low", "ci_high")}}


def _tried_again(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("policy", "num_attempts", "reads_test_verdicts", "episodes", "best_minus_reflexion")
    return {**_shared(row["result"]), "without_notes": _shared(row["retries"]), **{name: row[name] for name in kept}}


def print_summary(summary: dict[str, Any], paths: Paths, console: SafeConsole) -> None:
    """Results, results by category, seconds and where to look next; fits 80 columns."""
    results = read_results(paths)
    frontier = [_frontier_table(summary["frontier"])] if "frontier" in summary else []
    elsewhere = [_elsewhere_table(summary["also"], results)] if "also" in summary else []
    in_parts = [_parts_table(summary["sharded"], results)] if "sharded" in summary else []
    for part in (
        _results_table(summary, results),
        *in_parts,
        *elsewhere,
        *frontier,
        _categories_table(results),
        _seconds_table(summary, results),
    ):
        console.print(part)
        console.print()
    console.print(_verdict(summary, results))
    if "untrained" in summary:
        console.print(summary["untrained"], style="bold yellow")
    for sentence in results.left_out:
        console.print(sentence, style="bold yellow")
    console.print()
    print_places(paths, console)


def print_places(paths: Paths, console: SafeConsole) -> None:
    """The pages of the last run, one per line and never wrapped, so that they can be copied."""
    for name, place in _places(paths):
        console.print(f"{name:<12}{place}", soft_wrap=True)


def _shared(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in SHARED_NUMBERS}


def _sharded(row: dict[str, Any]) -> dict[str, Any]:
    """Per policy the same problems at once and in parts, and the drop; beside them the user's own noise."""
    policies = {
        policy: {
            "at_once": _shared(row["at_once"][policy]),
            "in_parts": _shared(row["results"][policy]),
            "drop": {name: row["drop"][policy][name] for name in ("difference", "ci_low", "ci_high")},
        }
        for policy in POLICIES
        if policy in row["results"]
    }
    return {**policies, "reveal": row["reveal"], "played_by": row["played_by"], "noise": row["noise"]}


def _results_table(summary: dict[str, Any], results: StoredResults) -> Table:
    table = new_table("Success", "success", results.interval_name, "problems", "episodes each")
    best, untrained = results.best_snapshot, ", untrained," if "untrained" in summary else ""
    rows = [
        ("base", summary["baseline"]),
        ("warm start", summary["warm_start"]),
        *_more_tries(summary),
        (f"{best} on select", summary["select"]),
        (f"{best}{untrained} on test", summary["test"]),
    ]
    if "greedy" in summary:
        rows.append((f"{best} on test, greedy", summary["greedy"]["best"]))
    if "frontier" in summary:
        rows.append((f"{short_name(summary['frontier']['model'])} on test", summary["frontier"]))
    if "reflexion" in summary:
        tried = summary["reflexion"]
        rows.append(("Reflexion, which reads verdicts", tried))
        rows.append(("the same tries without notes", tried["without_notes"]))
    for name, result in rows:
        style = "bold green" if result is summary["test"] else None
        numbers = [percent(result["success_rate"]), interval(result), str(result["num_problems"])]
        table.add_row(name, *numbers, str(result["samples_per_problem"]), style=style)
    for name, result in summary.get("baselines", {}).items():
        numbers = [percent(result["success_rate"]), interval(result)]
        table.add_row(name.replace("_", " "), *numbers, str(result["num_problems"]), "no model", style="dim")
    return table


def _more_tries(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The warm start with as many tries, if more than one, as cost the tokens of one episode of the best snapshot."""
    found = summary.get("warm_start_best_of_k")
    tries = found and f"{found['k']:.2g}"
    if not found or tries == "1":
        return []
    return [(f"warm start, best of {tries}", {**found, "samples_per_problem": tries})]


def _parts_table(told: dict[str, Any], results: StoredResults) -> Table:
    """The same problems of test told at once and in parts."""
    table = new_table("Success told in parts, %", "at once", "in parts", f"lost, {results.interval_name}", "problems")
    for policy, name in {**POLICIES, "best": results.best_snapshot}.items():
        row = told[policy]
        rates = (percent(row[way]["success_rate"]).rstrip("%") for way in ("at_once", "in_parts"))
        table.add_row(name, *rates, difference_text(row["drop"]), str(row["in_parts"]["num_problems"]))
    return table


def _elsewhere_table(also: dict[str, Any], results: StoredResults) -> Table:
    """Environments that training never saw."""
    table = new_table("Never seen in training, %", "base", "warm", "best", f"base to best, {results.interval_name}")
    for name, row in also.items():
        rates = (percent(row[policy]["success_rate"]).rstrip("%") for policy in POLICIES)
        table.add_row(printable(name), *rates, difference_text(row["gain"]))
    return table


def _frontier_table(frontier: dict[str, Any]) -> Table:
    """What the model behind the endpoint cost; a dash where nothing was counted, or no price is known."""
    table = new_table("Frontier, per episode", "requests", "tokens in", "tokens out", "cost")
    numbers = [
        "–" if frontier[f"{name}_per_episode"] is None else format(frontier[f"{name}_per_episode"], digits)
        for name, digits in {"requests": ".1f", "input_tokens": ",.0f", "output_tokens": ",.0f", "cost": ".4f"}.items()
    ]
    table.add_row(short_name(frontier["model"]), *numbers)
    return table


def _categories_table(results: StoredResults) -> Table:
    """Percent without its sign: the demo's longest category, 43 letters, must fit on one line of 80."""
    table = new_table("Success by category, %", "base", "warm", "best", results.interval_name)
    for category in results.categories:
        table.add_row(
            printable(category),
            *(rate_of_category(results.test[policy], category).rstrip("%") for policy in POLICIES),
            interval(results.test["best"]["by_category"][category]),
        )
    return table


def _seconds_table(summary: dict[str, Any], results: StoredResults) -> Table:
    table = new_table("Seconds", *STAGES, "total")
    seconds = [summary["seconds"][name] for name in (*STAGES, "total")]
    table.add_row("this run", *("–" if value is None else f"{value:.1f}" for value in seconds))
    cached = results.run.get("cached") or {}
    if any(cached.values()):
        table.add_row("", *("cached" if cached.get(name) else "" for name in STAGES), style="dim")
    return table


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is named by its title; numbers are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column(Text(title, "bold"), overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", header_style="dim", no_wrap=True)
    return table


def _verdict(summary: dict[str, Any], results: StoredResults) -> Text:
    from rich.text import Text

    champion = summary["champion"]
    if results.decision is None:
        return Text(
            "No promotion was attempted. Run `python -m tasks promote`, or `python -m flows run` for everything."
        )
    if champion["promoted"]:
        told, tone = f"{champion['model']} version {champion['version']} became the champion", "bold green"
    else:
        told, tone = f"{results.best_snapshot} {results.not_promoted}", "bold yellow"
    return Text.assemble((told, tone), f" ({_answer(results.decision)})")


def _answer(decision: Mapping[str, Any]) -> str:
    """`promote`; where a person answered, that it was one and what the policy says."""
    by_hand = decision.get("override")
    if not by_hand:
        return str(decision["decision"])
    who = by_hand.get("by") or "an operator"
    return printable(f"{BY_HAND[by_hand['kind']]} by {who}; the policy says {decision['policy_decision']}")


def _places(paths: Paths) -> list[tuple[str, str]]:
    page = paths.stage("promote") / "decision.html"  # a decision from before there were pages has none
    files = {
        "chart": paths.artifacts / "progress.png",
        "report": paths.artifacts / "report" / "index.html",
        "decision": page if page.exists() else page.with_suffix(".json"),
        "validation": paths.artifacts / "validation" / "index.html",
    }
    places = [(name, as_shell_sees(path)) for name, path in files.items() if path.exists()]
    return places + [("mlflow", place) for place in _mlflow(paths)]


def _mlflow(paths: Paths) -> Iterator[str]:
    """The server's address, or the command that shows the database."""
    record = paths.artifacts / "run.json"
    uri = (read_json(record) if record.exists() else {}).get(
        "mlflow_uri", f"{SQLITE}{paths.artifacts}/mlflow/mlflow.db"
    )
    if uri.startswith("http"):
        yield uri
    elif uri.startswith(SQLITE) and Path(uri.removeprefix(SQLITE)).exists():
        mlflow, database = Path(sys.executable).parent / "mlflow", as_shell_sees(Path(uri.removeprefix(SQLITE)))
        if mlflow.is_relative_to(Path.cwd()):
            mlflow = mlflow.relative_to(Path.cwd())
        # For this machine only, whatever MLFLOW_HOST is, and without usage data.
        command = [str(mlflow), "ui", "--host", "127.0.0.1", "--backend-store-uri", f"{SQLITE}{database}"]
        yield f"MLFLOW_DISABLE_TELEMETRY=true {shlex.join(command)}"
