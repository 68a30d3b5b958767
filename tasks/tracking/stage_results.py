"""What the run of each stage shows in MLflow, read from the stage's files: metrics to sort by, curves, and tables of
the rest. A runs table with two hundred columns is unreadable, hence MAX_METRICS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.files import number_of, read_json, read_jsonl
from tasks.core.records import BY_ENVIRONMENT, MEAN_PARTS
from tasks.core.settings import Paths
from tasks.tracking.metrics import MAX_METRICS, Point, flatten, numbers, row_points
from tasks.tracking.versions import DECISION_FILE

Row = Mapping[str, Any]
INTERVAL = ("success_rate", "ci_low", "ci_high")
TRIED_AGAIN = {"with_notes": "result", "without_notes": "retries"}  # attempts of the frozen policy
DIFFERENCE = ("difference", "ci_low", "ci_high")


@dataclass(frozen=True, slots=True)
class StageResults:
    """Points of at most MAX_METRICS metrics (less `seconds`, which every run has; more only for the environments that a
    person added), and rows by the table's file.
    """

    points: list[Point] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = {point.key for point in self.points}
        assert sum(not key.startswith((BY_ENVIRONMENT, MEAN_PARTS, "also/", "sharded/")) for key in keys) < MAX_METRICS


def read_results(stage: str, paths: Paths) -> StageResults:
    readers: dict[str, Callable[[Path], StageResults]] = {
        "curate": lambda folder: _curated(read_json(folder / "card.json")),
        "assess": lambda folder: _assessed(read_json(folder / "baseline.json")),
        "warm_start": lambda folder: _learnt(folder / "metrics.jsonl", "step"),
        "train": lambda folder: _learnt(folder / "metrics.jsonl", "iteration"),
        "evaluate": lambda folder: _evaluated(read_json(folder / "evaluation.json")),
        "promote": lambda folder: _decided(read_json(folder / DECISION_FILE)),
    }
    try:
        return readers[stage](paths.stage(stage))
    except (KeyError, ValueError):  # another version of the stage, or no such file
        return StageResults()


def headline(paths: Paths) -> list[Point]:
    """What the parent run shows: the chosen snapshot on test and on select, and its comparisons."""
    try:
        evaluation = read_json(paths.stage("evaluate") / "evaluation.json")
        return headline_of(evaluation)
    except (KeyError, ValueError):
        return []


def headline_of(evaluation: Row) -> list[Point]:
    return [*_test_points(evaluation), *_chosen_points(evaluation)]


def outcome_tags(paths: Paths) -> dict[str, str]:
    try:
        outcome = read_json(paths.stage("promote") / "outcome.json")
    except ValueError:
        return {}
    return {name: str(value) for name, value in outcome.items() if value is not None}


def _curated(card: Row) -> StageResults:
    counts = {name: card[name] for name in ("num_problems", "num_duplicates_removed") if name in card}
    by_category = card.get("by_category", {})
    return StageResults(numbers(counts, "", 0), {"categories.json": _categories_by_split(by_category)})


def _categories_by_split(by_category: Row) -> list[Row]:
    names = sorted({name for counts in by_category.values() if isinstance(counts, dict) for name in counts})
    return [{"category": name, **{split: by_category[split].get(name, 0) for split in by_category}} for name in names]


def _assessed(result: Row) -> StageResults:
    points = numbers({name: result[name] for name in (*INTERVAL, "num_problems") if name in result}, "", 0)
    results = [("select", "base", result)]
    return StageResults(points, {"policies.json": [_policy_row(*item) for item in results], **_by_category(results)})


def _learnt(file: Path, step: str) -> StageResults:
    rows = [row for _, row in read_jsonl(file)]
    points = [point for row in rows for point in row_points(row, step)]
    return StageResults(points, {f"{step}s.json": [dict(flatten(row, "", "/")) for row in rows]})


def _evaluated(evaluation: Row) -> StageResults:
    """The curve `select/success_rate` leaves out snapshots that racing dropped: they met fewer problems."""
    select = evaluation["select"]
    most = max(result["num_problems"] for result in select.values())
    curve = [
        point
        for snapshot, result in select.items()
        if result["num_problems"] == most
        for point in numbers({name: result[name] for name in INTERVAL}, "select", number_of(snapshot))
    ]
    results = [("select", name, result) for name, result in select.items()]
    for split in ("test", "baselines"):
        results += [(split, name, result) for name, result in (evaluation.get(split) or {}).items()]
    elsewhere = [
        (f"also/{name}", policy, result)
        for name, row in (evaluation.get("also") or {}).items()
        for policy, result in row["results"].items()
    ]
    if reflexion := evaluation.get("reflexion"):
        elsewhere += [("reflexion", name, reflexion[key]) for name, key in TRIED_AGAIN.items()]
    results += elsewhere
    policies = [_policy_row(*item) for item in results]
    return StageResults([*_test_points(evaluation), *curve], {"policies.json": policies, **_by_category(results)})


def _test_points(evaluation: Row) -> list[Point]:
    points = []
    for policy, result in evaluation["test"].items():
        names = INTERVAL if policy == "best" else ("success_rate",)
        points += numbers({name: result[name] for name in names}, f"test/{policy}", 0)
    for name, row in (evaluation.get("also") or {}).items():
        rates = {policy: result["success_rate"] for policy, result in row["results"].items()}
        points += numbers({**rates, "gain": {key: row["gain"][key] for key in DIFFERENCE}}, f"also/{name}", 0)
    if reflexion := evaluation.get("reflexion"):
        points += numbers({"success_rate": reflexion["result"]["success_rate"]}, "reflexion", 0)
    gain = evaluation.get("gain_over_warm_start") or {}
    for policy, drop in (evaluation.get("sharded") or {}).get("drop", {}).items():
        told = evaluation["sharded"]["results"][policy]
        points += numbers({"success_rate": told["success_rate"]}, f"sharded/{policy}", 0)
        points += numbers({name: drop[name] for name in DIFFERENCE}, f"sharded/{policy}/drop", 0)
    return points + numbers({name: gain[name] for name in DIFFERENCE if name in gain}, "gain_over_warm_start", 0)


def _chosen_points(evaluation: Row) -> list[Point]:
    chosen = evaluation["select"][evaluation["best_snapshot"]]
    return numbers({name: chosen[name] for name in (*INTERVAL, "num_problems")}, "select", 0)


def _policy_row(split: str, name: str, result: Row) -> Row:
    first = {key: result[key] for key in (*INTERVAL, "num_problems") if key in result}
    rest = {key: value for key, value in result.items() if key != "by_category"}
    return {"split": split, "policy": name, **first, **dict(flatten(rest, "", "/"))}


def _by_category(results: list[tuple[str, str, Row]]) -> dict[str, list[Row]]:
    rows: list[Row] = [
        {**_policy_row(split, name, row), "category": category}
        for split, name, result in results
        for category, row in result.get("by_category", {}).items()
    ]
    return {"categories.json": rows}


def _decided(decision: Row) -> StageResults:
    comparison = decision.get("comparison") or {}
    points = numbers({name: comparison[name] for name in DIFFERENCE if name in comparison}, "", 0)
    checks: list[Row] = [
        {name: check[name] for name in ("name", "passed", "sentence")} for check in decision.get("checks", [])
    ]
    return StageResults(points, {"checks.json": checks})
