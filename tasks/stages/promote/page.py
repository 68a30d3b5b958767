"""decision.html: the decision as a page for people: every check, number and reason of decision.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.core.pages import render
from tasks.report.results import percent
from tasks.stages.promote.checks.check import p_text
from tasks.stages.promote.error_budget import budget_text, looks_text, percent_text
from tasks.stages.promote.overrides import ManualOverride
from tasks.stages.promote.policy import WAYS

TEMPLATES = Path(__file__).parent / "templates"
TONES = {"promote": "good", "hold": "warn", "reject": "bad"}
CONDUCT = {
    "mean_sampled_tokens": ("tokens sampled an episode", None),
    "mean_calls": ("tool calls an episode", None),
    "invalid_call_share": ("calls that were invalid", "max_invalid_call_share"),
    "overlong_share": ("episodes that ended overlong", "max_overlong_share"),
}


def render_decision(row: Mapping[str, Any], headline: str) -> str:
    """The page of what decision.json holds; `headline` is what became of the challenger, in one line."""
    filters: dict[str, Callable[..., str]] = {
        "percent": percent,
        "points": points,
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
        marks=[(mark_of(check, checks), check["sentence"]) for check in row["checks"]],
        remarks=remarks_of(row),
        margin=(row["policy"]["or_cheaper"] or {}).get("max_success_loss"),
        categories=categories,
        reach=reach_of(categories),
        level=level_of(categories),
        conduct=CONDUCT,
        looks=looks_text(row["test_set"]) if row["test_set"] else "",
        budget=budget_text(row["error_budget"]) if row["error_budget"] else "",
        policy=dict(flattened(row["policy"])),
    )


def remarks_of(row: Mapping[str, Any]) -> list[str]:
    """The reasons that are neither a check's sentence nor the person's, which have places of their own."""
    shown = {check["sentence"] for check in row["checks"]}
    if row["override"]:
        shown.add(ManualOverride(**row["override"]).sentence)
    return [reason for reason in row["reasons"] if reason not in shown]


def mark_of(check: Mapping[str, Any], checks: Mapping[str, Mapping[str, Any]]) -> str:
    """passed, failed, or needless: one of two ways that is closed while the other is open."""
    if check["passed"]:
        return "passed"
    is_open = any(checks[way]["passed"] for way in WAYS if way in checks)
    return "needless" if check["name"] in WAYS and is_open else "failed"


def reach_of(categories: Mapping[str, Any] | None) -> float:
    """How far the plots of the categories reach to both sides of 0."""
    rows = categories["by_category"].values() if categories else ()
    return max((abs(row[bound]) for row in rows for bound in ("ci_low", "ci_high")), default=1.0) or 1.0


def level_of(categories: Mapping[str, Any] | None) -> float:
    """At which p-value a category seems to lose, one for all."""
    rows = categories["by_category"].values() if categories else ()
    return max((float(row["level"]) for row in rows), default=0.0)


def flattened(options: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The settings as rows of a table, named as in params.yaml."""
    rows: list[tuple[str, str]] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            rows += flattened(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", _as_in_yaml(value)))
    return rows


def _as_in_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_in_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def points(value: float) -> str:
    return f"{value:+.1%}"


def moment(time: str) -> str:
    """`2026-11-21T21:40:05+00:00` as `2026-11-21 21:40 UTC`."""
    return f"{time[:10]} {time[11:16]} UTC"
