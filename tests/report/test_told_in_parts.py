"""Success at once and in parts, in the summary, the report and MLflow."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tasks.core.console import SafeConsole
from tasks.core.files import read_json, write_json
from tasks.core.settings import Paths
from tasks.report.build import build_report
from tasks.report.summary import build_summary, print_summary
from tasks.tracking.stage_results import read_results as tracked
from tests.measurement.synthetic import write_artifacts
from tests.report.test_beside import rate

pytestmark = pytest.mark.slow

POLICIES = {"base": 0.05, "warm_start": 0.2, "best": 0.5}
DROP = {"difference": 0.4, "ci_low": 0.3, "ci_high": 0.5}
SHARDED = {
    "results": {name: rate(success) for name, success in POLICIES.items()},
    "at_once": {name: rate(success + 0.4) for name, success in POLICIES.items()},
    "drop": dict.fromkeys(POLICIES, DROP),
    "reveal": "sharded",
    "played_by": "script",
    "noise": {"num_replays": 2, "num_episodes": 40, "variance": 0.0, "changed_share": 0.0, "standard_error": 0.0},
}


def tell_in_parts(paths: Paths) -> Paths:
    """The run whose evaluation measured this too."""
    file = paths.stage("evaluate") / "evaluation.json"
    write_json(file, {**read_json(file), "sharded": SHARDED})
    return paths


def told_in_parts(line: str, name: str) -> bool:
    return line.startswith(f"{name} ") and "(+30.0" in line


def test_each_policy_has_both_and_what_telling_in_parts_costs(tmp_path: Path) -> None:
    paths, stream = write_artifacts(tmp_path), io.StringIO()
    assert "sharded" not in build_summary(paths) and "told in parts" not in build_report(paths).read_text("utf-8")
    tell_in_parts(paths)
    summary = build_summary(paths)
    assert (summary["sharded"]["best"]["in_parts"]["success_rate"], summary["sharded"]["best"]["drop"]) == (0.5, DROP)
    print_summary(summary, paths, SafeConsole(file=stream, width=80))
    for name, told in {
        "base": "45.0 5.0",
        "warm start": "60.0 20.0",
        summary["select"]["snapshot"]: "90.0 50.0",
    }.items():
        (line,) = [" ".join(line.split()) for line in stream.getvalue().splitlines() if told_in_parts(line, name)]
        assert line == f"{name} {told} +40.0 (+30.0 to +50.0) 40"
    page = " ".join(build_report(paths).read_text(encoding="utf-8").split())
    rows = page.partition("told in parts</h2>")[2].partition("</table>")[0].split("<tr class=")[1:]
    assert [row.split('"')[1] for row in rows] == ["base", "warm_start", "best"]
    assert ">90.0%<" in rows[2] and ">50.0%<" in rows[2] and ">45.0–55.0<" in rows[2]
    assert all(">+40.0 <" in row and "(+30.0 to +50.0)" in row for row in rows)
    assert "0.0% changed their success" in page and "standard error of 0.00 points" in page
    points = {point.key: point.value for point in tracked("evaluate", paths).points}
    assert (points["sharded/best/success_rate"], points["sharded/best/drop/difference"]) == (0.5, 0.4)
