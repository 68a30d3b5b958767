"""Builds what a person reads after a run: the progress chart, summary.json and the report.

The report is a folder: `index.html` (the overview), its pictures, and `trajectories.html` (`browser.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tasks.core.files import atomic_file, atomic_folder, write_json, write_text
from tasks.core.pages import page_text, render
from tasks.core.records import Outcome
from tasks.core.settings import Paths
from tasks.measurement.points import difference_text
from tasks.report.browser import Policy, write_browser
from tasks.report.chart import progress_chart
from tasks.report.drawing import DARK, DARK_NARROW, LIGHT, LIGHT_NARROW
from tasks.report.marks import SIGNS, WORDS, marks_of
from tasks.report.results import (
    POLICIES,
    StoredResults,
    interval,
    percent,
    rate_of_category,
    read_results,
    short_name,
)
from tasks.report.script_files import address_of
from tasks.report.summary import build_summary
from tasks.rewards.settings import RewardSettings
from tasks.rewards.stored import Rescorer
from tasks.tracking.versions import DECISION_FILE

TEMPLATES = Path(__file__).parent / "templates"
OVERVIEW_FROM_DECISION = 'href="../report/index.html"'  # as decision.html links to it from the folder of promote
CHARTS = {
    "progress.png": LIGHT,
    "progress.svg": LIGHT,
    "progress-dark.png": DARK,
    "progress-narrow.png": LIGHT_NARROW,
    "progress-narrow-dark.png": DARK_NARROW,
}

OUTCOMES: dict[Outcome, str] = {
    "success": "succeeded",
    "failure": "failed",
    "max_turns": "ran out of turns",
    "overlong": "ran out of tokens",
    "environment_error": "were lost to an environment error",
}


def build_all(paths: Paths, rewards: RewardSettings | None = None) -> dict[str, Any]:
    """Write artifacts/progress.png and .svg, artifacts/report/ and artifacts/summary.json; returns the summary."""
    summary = build_summary(paths)
    report = build_report(paths, rewards).parent
    for name in ("progress.png", "progress.svg"):
        with atomic_file(paths.artifacts / name) as temporary:
            shutil.copyfile(report / name, temporary)
    write_json(paths.artifacts / "summary.json", summary)
    return summary


def build_report(paths: Paths, rewards: RewardSettings | None = None) -> Path:
    """Write artifacts/report/ from stored files alone; returns its index.html. ValueError without an evaluation."""
    results = read_results(paths)
    folder, decision_page = paths.artifacts / "report", _decision_page(paths, results)
    with atomic_folder(folder) as temporary:
        title = f"{results.name} · turnwise report"
        rescorer = Rescorer(paths, rewards, ("test",)) if rewards and rewards.parts else None
        shown = shown_policies(paths, results)
        changes = write_browser(temporary, shown, title=title, overview="index.html", rescorer=rescorer)
        for name, style in CHARTS.items():
            progress_chart(paths, temporary / name, style=style)
        if decision_page:
            text = decision_page.read_text(encoding="utf-8").replace(OVERVIEW_FROM_DECISION, 'href="index.html"')
            write_text(temporary / decision_page.name, text)
            shutil.copyfile(decision_page.with_suffix(".json"), temporary / DECISION_FILE)
        filters: dict[str, Callable[..., Any]] = {"percent": percent, "interval": interval, "place": place_in_browser}
        page = render(
            TEMPLATES,
            "index.html.jinja",
            filters=filters,
            summary=build_summary(paths),
            results=results,
            marks=marks_of(results.decision) if results.decision else [],
            signs=SIGNS,
            words=WORDS,
            policies={**POLICIES, "best": results.best_snapshot},
            outcomes=OUTCOMES,
            changes=changes,
            trajectory_folder=paths.stage("evaluate") / "trajectories",
            rate_of_category=rate_of_category,
            points=difference_text,
            decision_page=decision_page.name if decision_page else None,
            addresses={file.name: address_of(file) for file in temporary.iterdir() if file.is_file()},
        )
        write_text(temporary / "index.html", page)
    return folder / "index.html"


def _decision_page(paths: Paths, results: StoredResults) -> Path | None:
    """None without this run's decision, or where that is from before there were pages."""
    page = paths.stage("promote") / "decision.html"
    return page if results.decision and page.exists() else None


def shown_policies(paths: Paths, results: StoredResults) -> list[Policy]:
    """Who was measured on `test`; base and best first, since the browser compares these."""
    snapshot = paths.stage("train") / "snapshots" / results.best_snapshot
    policies = [
        Policy("base", "base", paths.test_episodes("base"), paths.base_model),
        Policy("best", results.best_snapshot, paths.test_episodes("best"), snapshot),
        Policy("warm_start", "warm start", paths.test_episodes("warm_start"), paths.start_model),
    ]
    champion, measured = champion_met(results), paths.stage("promote") / "trajectories.jsonl"
    if champion is not None and measured.exists():
        # Most often its tokenizer is this run's; where it is not, the page shows ids.
        policies.append(Policy("champion", champion, measured, snapshot))
    frontier = paths.test_episodes("frontier")
    if results.frontier is not None and frontier.exists():
        policies.append(Policy("frontier", short_name(results.frontier["model"]), frontier))
    return policies


def champion_met(results: StoredResults) -> str | None:
    decision = results.decision or {}
    before, comparison = decision.get("champion_before"), decision.get("comparison")
    if not before or not comparison or comparison["against"] != f"the champion, version {before['version']}":
        return None
    return f"champion{' before' if decision['is_champion'] else ''}, version {before['version']}"


def place_in_browser(filters: Mapping[str, str]) -> str:
    """Where trajectories.html lists what fits the filters, whose values are written as its index writes them."""
    return f"#{urlencode({name: page_text(value) for name, value in filters.items()})}"
