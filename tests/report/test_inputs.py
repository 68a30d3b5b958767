"""What the report shows beside an evaluation is what that evaluation read, or it is left out with the reason."""

from __future__ import annotations

import io
import os
import shutil
import time
from pathlib import Path

import pytest

from tasks.core.console import SafeConsole
from tasks.core.files import content_hash, read_json, write_json, write_jsonl
from tasks.core.provenance import provenance_file, write_provenance
from tasks.core.settings import Paths
from tasks.report import inputs
from tasks.report.build import build_report
from tasks.report.chart import progress_chart
from tasks.report.results import read_results, read_training
from tasks.report.summary import build_summary, print_summary
from tests.measurement.synthetic import write_artifacts
from tests.records_of_stages import write_records

ATTEMPTS = [{"success": 0.4, "num_steps": 500, "end": "reached", "learning_rate": 0.001, "is_kept": True}]


def record(paths: Paths, stage: str) -> None:
    """As the stage leaves it at its end."""
    write_provenance(read_json(provenance_file(stage, paths)), paths)


def date_later(paths: Paths, *stages: str) -> None:
    """Files of a killed run are newer than the record before; a clock of whole ticks may not show it here."""
    for file in (file for stage in stages for file in paths.stage(stage).rglob("*")):
        os.utime(file, (time.time() + 9, time.time() + 9))


def train_again(paths: Paths) -> None:
    """7 steps per iteration instead of 2, and nothing was learnt."""
    rows = [{**row, "success_rate": 0.05, "optimizer_steps": 7 * row["iteration"]} for row in read_training(paths)]
    write_jsonl(paths.stage("train") / "metrics.jsonl", rows)
    best = read_results(paths).best_snapshot
    row = {"is_trained": False, "num_iterations": 20, "num_with_signal": 0, "success_rate": 0.05}
    write_json(paths.stage("train") / "learnt.json", {**row, "untrained_snapshots": [best]})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Stages with their records, and an evaluation that read them."""
    monkeypatch.chdir(tmp_path)
    paths = write_artifacts(tmp_path / "artifacts", problems_per_type=1, num_snapshots=2)
    write_json(paths.stage("warm_start") / "attempts.json", ATTEMPTS)
    write_records(paths, {})
    read = {f"artifacts/{stage}": content_hash(paths.stage(stage)) for stage in ("assess", "warm_start", "train")}
    file = provenance_file("evaluate", paths)
    write_json(file, {**read_json(file), "data": read})
    return paths


def test_what_the_evaluation_read_is_shown_without_reading_the_weights(run: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inputs, "content_hash", lambda folder: pytest.fail(f"{folder} was hashed"))
    results = read_results(run)
    assert results.left_out == []
    assert (len(results.training), results.attempts, results.baseline is None) == (20, ATTEMPTS, False)


def test_without_a_record_of_what_was_read_all_is_shown(run: Paths):
    train_again(run)
    provenance_file("evaluate", run).unlink()
    assert len(read_results(run).training) == 20


@pytest.mark.parametrize("is_killed", [False, True], ids=["whole", "killed before its record"])
def test_a_training_since_the_evaluation_has_no_curves_steps_or_verdict_in_its_report(run: Paths, is_killed: bool):
    idle = {"iteration_seconds": 1.0, "trainer_idle_seconds": 0.5, "engine_idle_seconds": 0.5}
    train_again(run)
    write_json(
        run.artifacts / "timings" / "idle.json", {**idle, "metrics": content_hash(run.stage("train") / "metrics.jsonl")}
    )
    date_later(run, "train") if is_killed else record(run, "train")
    results = read_results(run)
    assert (results.training, results.untrained, results.idle) == ([], None, {})
    assert results.attempts == ATTEMPTS
    (sentence,) = results.left_out
    assert str(run.stage("train")) in sentence and "python -m tasks evaluate" in sentence
    assert "untrained" not in build_summary(run)


@pytest.mark.slow
def test_the_chart_the_page_and_the_terminal_leave_that_training_out_and_the_last_two_say_so(run: Paths):
    before = progress_chart(run, run.artifacts / "chart.svg").read_text("utf-8")
    assert "training batches" in before and "optimizer step" in before
    train_again(run)
    record(run, "train")
    chart = progress_chart(run, run.artifacts / "chart.svg").read_text("utf-8")
    assert "training batches" not in chart and "optimizer step" not in chart
    stream = io.StringIO()
    print_summary(build_summary(run), run, SafeConsole(file=stream, width=200))
    for told in (stream.getvalue(), build_report(run).read_text("utf-8")):
        assert "is not what this evaluation read, so the curves of training are left out" in told


def test_a_warm_start_or_baseline_since_the_evaluation_is_left_out_alike(run: Paths):
    write_json(run.stage("warm_start") / "attempts.json", [*ATTEMPTS, *ATTEMPTS])
    write_json(run.stage("assess") / "baseline.json", {**read_json(run.stage("assess") / "baseline.json"), "x": 1})
    date_later(run, "warm_start", "assess")
    results = read_results(run)
    assert (results.attempts, results.baseline, len(results.training)) == ([], None, 20)
    assert [sentence.split(" is not ")[0] for sentence in results.left_out] == [
        str(run.stage("assess")), str(run.stage("warm_start")),
    ]  # fmt: skip


def test_a_training_that_is_gone_or_being_made_again_is_said_to_be(run: Paths):
    shutil.rmtree(run.stage("train"))
    results = read_results(run)
    assert results.training == []
    assert results.left_out == [
        f"{run.stage('train')} is gone or being made again, so the curves of training are left out."
    ]


def test_large_results_that_a_checkout_wrote_after_their_record_are_not_hashed(
    run: Paths, monkeypatch: pytest.MonkeyPatch
):
    date_later(run, "assess", "warm_start", "train")
    monkeypatch.setattr(inputs, "MAX_HASHED", 1)
    monkeypatch.setattr(inputs, "content_hash", lambda folder: pytest.fail(f"{folder} was hashed"))
    assert read_results(run).left_out == []
