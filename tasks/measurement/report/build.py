"""Builds what a person looks at after a run: the progress chart, the report page and summary.json.

The report is one folder that opens from disk with no network: no script, styles inline, pictures beside the page. All
text passes jinja2's autoescape and `printable`, and the page's own content policy forbids scripts and requests, so that
whatever a model or a tool wrote stays text. Left out for now: filters, search, more than ten episodes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tasks.measurement.drawing import DARK, DARK_NARROW, LIGHT, LIGHT_NARROW
from tasks.measurement.figures import progress_chart
from tasks.measurement.report.trajectories import printable, read_pairs
from tasks.measurement.results import POLICIES, interval, percent, rate_of_type, read_results
from tasks.measurement.summary import build_summary
from tasks.records import Outcome
from tasks.settings import Paths
from tasks.storage import atomic_folder, write_json, write_text

TEMPLATES = Path(__file__).parent / "templates"
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


def build_all(paths: Paths) -> dict[str, Any]:
    """Write artifacts/progress.png and .svg, artifacts/report/ and artifacts/summary.json; returns the summary."""
    summary = build_summary(paths)
    for name in ("progress.png", "progress.svg"):
        progress_chart(paths, paths.artifacts / name)
    build_report(paths)
    write_json(paths.artifacts / "summary.json", summary)
    return summary


def build_report(paths: Paths) -> Path:
    """Write artifacts/report/ from stored files alone; returns its index.html.

    ValueError where evaluation has not run; without promotion the page says so and stands.
    """
    results = read_results(paths)
    page = _render(
        summary=build_summary(paths),
        results=results,
        policies={**POLICIES, "best": results.best_snapshot},
        outcomes=OUTCOMES,
        pairs=read_pairs(paths, results),
        trajectory_folder=paths.stage("evaluate") / "trajectories",
    )
    folder = paths.artifacts / "report"
    with atomic_folder(folder) as temporary:
        for name, style in CHARTS.items():
            progress_chart(paths, temporary / name, style=style)
        write_text(temporary / "index.html", page)
    return folder / "index.html"


def _render(**values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Runs on every value before it is escaped, so no expression in a template can forget it.
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters.update(percent=percent, interval=interval, breakable=_breakable)
    environment.globals.update(rate_of_type=rate_of_type)
    return environment.get_template("index.html.jinja").render(**values)


def _breakable(name: str) -> list[str]:
    """`quote/timeout/check_card` in pieces a narrow column may break between."""
    return re.findall(r"[^/_]*[/_]?", name)[:-1]
