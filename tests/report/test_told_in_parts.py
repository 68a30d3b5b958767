"""Success at once and in parts, in the summary, the report and MLflow."""

from __future__ import annotations

import io
from pathlib import Path

from tasks.core.console import SafeConsole
from tasks.core.files import read_json, write_json
from tasks.report.build import build_report
from tasks.report.summary import build_summary, print_summary
from tasks.tracking.stage_results import read_results as tracked
from tests.measurement.synthetic import write_artifacts
from tests.report.test_beside import rate

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


def test_each_policy_has_both_and_what_telling_in_parts_costs(tmp_path: Path) -> None:
    paths, stream = write_artifacts(tmp_path), io.StringIO()
    assert "sharded" not in build_summary(paths) and "Told in parts" not in build_report(paths).read_text("utf-8")
    file = paths.stage("evaluate") / "evaluation.json"
    write_json(file, {**read_json(file), "sharded": SHARDED})
    summary = build_summary(paths)
    assert (summary["sharded"]["best"]["in_parts"]["success_rate"], summary["sharded"]["best"]["drop"]) == (0.5, DROP)
    print_summary(summary, paths, SafeConsole(file=stream, width=80))
    (line,) = [line for line in stream.getvalue().splitlines() if line.startswith("… the same in parts")]
    assert line.split()[-4:] == ["50.0%", "45.0–55.0", "40", "1"]
    page = " ".join(build_report(paths).read_text(encoding="utf-8").split())
    assert "Told in parts" in page and "50.0% (45.0–55.0)" in page and "+40.0 (30.0–50.0)" in page
    assert "0.0% changed their success" in page and "standard error of 0.00 points" in page
    points = {point.key: point.value for point in tracked("evaluate", paths).points}
    assert (points["sharded/best/success_rate"], points["sharded/best/drop/difference"]) == (0.5, 0.4)
