"""What is measured beside the result: environments that training never saw, and Reflexion."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tasks.core.console import SafeConsole
from tasks.core.files import read_json, write_json
from tasks.core.settings import Paths
from tasks.measurement.points import points
from tasks.report.build import build_report
from tasks.report.chart import in_words
from tasks.report.results import read_results
from tasks.report.summary import build_summary, print_summary
from tasks.stages.promote.page import render_decision
from tasks.stages.promote.record import headline
from tasks.tracking.stage_results import read_results as tracked
from tests.measurement.decisions import ROWS
from tests.measurement.synthetic import write_artifacts

GAIN = {"difference": 0.12, "ci_low": 0.031, "ci_high": 0.209}


def rate(success: float) -> dict[str, Any]:
    ends = {"ci_low": success - 0.05, "ci_high": success + 0.05}
    return {"success_rate": success, **ends, "num_problems": 40, "samples_per_problem": 1, "by_category": {}}


ALSO = {
    "bfcl": {
        "environment": "bfcl",
        "results": {"base": rate(0.2), "warm_start": rate(0.25), "best": rate(0.32)},
        "gain": GAIN,
    }
}
REFLEXION = {
    "policy": "warm_start",
    "num_attempts": 3,
    "reads_test_verdicts": True,
    "result": {**rate(0.6), "samples_per_problem": 3},
    "retries": {**rate(0.55), "samples_per_problem": 3},
    "success_within": [{"attempts": k, "reflexion": 0.4 + k / 15, "retries": 0.4 + k / 20} for k in (1, 2, 3)],
    "episodes": {"rl_training": 14080, "reflexion_at_most": 330, "reflexion": 201, "retries": 207},
    "best_minus_reflexion": GAIN,
    "reflexion_minus_retries": GAIN,
}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = write_artifacts(tmp_path)
    file = made.stage("evaluate") / "evaluation.json"
    write_json(file, {**read_json(file), "also": ALSO, "reflexion": REFLEXION})
    return made


@pytest.mark.slow
def test_the_summary_has_a_row_per_environment_and_both_budgets_of_reflexion(paths: Paths):
    summary, stream = build_summary(paths), io.StringIO()
    assert summary["also"]["bfcl"]["gain"] == GAIN
    assert summary["also"]["bfcl"]["best"]["success_rate"] == 0.32
    assert (summary["reflexion"]["success_rate"], summary["reflexion"]["without_notes"]["success_rate"]) == (0.6, 0.55)
    assert summary["reflexion"]["episodes"]["rl_training"] == 14080
    print_summary(summary, paths, SafeConsole(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    (row,) = [line for line in lines if line.startswith("bfcl")]
    assert row.split() == ["bfcl", "20.0", "25.0", "32.0", "+12.0", "(+3.1", "to", "+20.9)"]
    (tried,) = [line for line in lines if line.startswith("Reflexion, which reads verdicts")]
    assert tried.split()[-4:] == ["60.0%", "55.0–65.0", "40", "3"]


@pytest.mark.slow
def test_the_report_shows_both_and_says_that_reflexion_reads_the_verdict(paths: Paths):
    page = " ".join(build_report(paths).read_text(encoding="utf-8").split())
    assert "In environments that training never saw" in page
    assert "+12.0 (+3.1 to +20.9)" in page
    assert "Both read the verdict of test problems" in page
    assert "14,080" in page and "201" in page
    words = in_words(read_results(paths))
    assert "Reflexion, 3 tries 60.0%" in words and "3 tries, no notes 55.0%" in words


@pytest.mark.slow
def test_a_run_without_them_says_nothing_of_them(tmp_path: Path):
    paths = write_artifacts(tmp_path)
    page = build_report(paths).read_text(encoding="utf-8")
    assert "Reflexion" not in page and "never saw" not in page
    assert not {"also", "reflexion"} & set(build_summary(paths))


@pytest.mark.slow
def test_mlflow_has_a_metric_per_environment(paths: Paths):
    found = tracked("evaluate", paths)
    metrics = {point.key: point.value for point in found.points}
    assert (metrics["also/bfcl/best"], metrics["also/bfcl/gain/difference"]) == (0.32, 0.12)
    assert metrics["reflexion/success_rate"] == 0.6
    rows = [(row["split"], row["policy"]) for row in found.tables["policies.json"]]
    assert ("also/bfcl", "base") in rows and ("reflexion", "without_notes") in rows


def test_the_decisions_page_shows_the_row_and_that_nothing_reads_it():
    row = {**ROWS["promote"], "also": ALSO}
    page = render_decision(row, headline(row))
    assert points(0.12) in page and "no check of this decision reads it" in page
