"""decision.html: every check, number and reason of decision.json as a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.core.pages import render
from tasks.measurement.points import interval_text, points, points_text
from tasks.report.marks import SIGNS, WORDS, marks_of
from tasks.report.results import percent
from tasks.stages.promote.checks.check import p_text
from tasks.stages.promote.decision import remarks_of
from tasks.stages.promote.error_budget import budget_text, looks_text, percent_text
from tasks.tracking.metrics import flatten

TEMPLATES = Path(__file__).parent / "templates"
TONES = {"promote": "good", "hold": "warn", "reject": "bad"}
CONDUCT = {
    "mean_sampled_tokens": ("tokens sampled per episode", None),
    "mean_calls": ("tool calls per episode", None),
    "invalid_call_share": ("calls that were invalid", "max_invalid_call_share"),
    "overlong_share": ("episodes that ended overlong", "max_overlong_share"),
}


def render_decision(row: Mapping[str, Any], headline: str) -> str:
    """The page of a decision.json; `headline` is the result in one line."""
    filters: dict[str, Callable[..., str]] = {
        "percent": percent,
        "points": points,
        "points_text": points_text,
        "interval": interval_text,
        "p": p_text,
        "moment": moment,
        "share": percent_text,
    }
    checks = {check["name"]: check for check in row["checks"]}
    categories = checks["categories"]["numbers"] if "categories" in checks else None
    return render(
        TEMPLATES,
        "decision.html.jinja",
        filters=filters,
        row=row,
        headline=headline,
        tones=TONES,
        marks=marks_of(row),
        signs=SIGNS,
        words=WORDS,
        remarks=remarks_of(row),
        margin=(row["policy"]["or_cheaper"] or {}).get("max_success_loss"),
        categories=categories,
        reach=reach_of(categories),
        level=level_of(categories),
        conduct=CONDUCT,
        looks=looks_text(row["test_set"]) if row["test_set"] else "",
        budget=budget_text(row["error_budget"]) if row["error_budget"] else "",
        policy={name: _as_in_yaml(value) for name, value in flatten(row["policy"])},
    )


def reach_of(categories: Mapping[str, Any] | None) -> float:
    rows = categories["by_category"].values() if categories else ()
    return max((abs(row[bound]) for row in rows for bound in ("ci_low", "ci_high")), default=1.0) or 1.0


def level_of(categories: Mapping[str, Any] | None) -> float:
    """The p-value below which a category seems to lose, the same for all."""
    rows = categories["by_category"].values() if categories else ()
    return max((float(row["level"]) for row in rows), default=0.0)


def _as_in_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def moment(time: str) -> str:
    """`2026-11-21T21:40:05+00:00` as `2026-11-21 21:40 UTC`."""
    return f"{time[:10]} {time[11:16]} UTC"
