"""A run is called trained only where its groups had something to teach, and an untrained snapshot is named as one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tasks.core.console import SafeConsole
from tasks.core.files import write_json
from tasks.core.settings import Paths
from tasks.measurement.learnt import (
    LEARNT_FILE,
    by_heart_sentence,
    learnt_row,
    read_untrained,
    untrained_sentence,
    what_to_do,
)
from tasks.report.build import build_report
from tasks.report.summary import build_summary, print_summary

SNAPSHOTS = {"iteration-0010": 10, "iteration-0020": 20}


def metrics(
    *with_signal: int, num_iterations: int = 20, success: float = 0.0, keeps: bool = False
) -> list[dict[str, Any]]:
    """Rows of a run in which these iterations had a group of unequal reward; where equal groups are kept all step."""
    return [
        {"iteration": number, "success_rate": success, "informative_group_share": 0.25 * (number in with_signal)}
        | ({"loss": 0.1} if keeps or number in with_signal else {})
        for number in range(1, num_iterations + 1)
    ]


def learnt(rows: list[dict[str, Any]], *, drops: bool = True, limit: float | None = 0.95) -> dict[str, Any]:
    return learnt_row(rows, snapshots=SNAPSHOTS, drops_zero_variance=drops, limit=limit)


@pytest.mark.parametrize("drops", [True, False])
def test_without_a_group_of_unequal_reward_no_snapshot_is_trained(drops: bool) -> None:
    row = learnt(metrics(keeps=not drops), drops=drops)
    assert (row["is_trained"], row["num_with_signal"], row["untrained_snapshots"]) == (False, 0, [*SNAPSHOTS])
    said = untrained_sentence(row, "iteration-0020")
    assert said.startswith("iteration-0020 is untrained: none of 20 iterations") and "every episode failed" in said
    assert "python -m tasks doctor" in what_to_do(row, has_warm_start=False)


def test_an_iteration_whose_unequal_group_was_filtered_away_taught_nothing() -> None:
    """Its rewards differ, but what differed was overlong: no step was taken, so no loss is in the row."""
    rows = [{**row, "informative_group_share": 0.5} for row in metrics()]
    assert not learnt(rows)["is_trained"]


def test_nearly_no_signal_is_none_by_the_share_the_sentinel_is_given() -> None:
    # One iteration of 20: a share without signal of 0.95, which is not above 0.95, and above 0.9.
    assert learnt(metrics(3))["is_trained"]
    hardly = learnt(metrics(3, success=0.4), limit=0.9)
    assert not hardly["is_trained"]
    said = untrained_sentence(hardly, "iteration-0020")
    assert "1 of 20 iterations" in said and "next to nothing" in said and "40% of the episodes" in said
    assert "sampling.temperature" in what_to_do(hardly, has_warm_start=False)
    assert learnt(metrics(3), limit=None)["is_trained"]
    assert not learnt(metrics(), limit=None)["is_trained"]


def test_solved_problems_teach_nothing_and_the_remedy_is_harder_ones() -> None:
    row = learnt(metrics(success=1.0))
    assert "every episode succeeded" in untrained_sentence(row, "iteration-0020")
    assert "harder" in what_to_do(row, has_warm_start=False)


def test_after_a_warm_start_that_reached_nothing_the_remedy_is_a_longer_one() -> None:
    row = learnt(metrics())
    assert "warm_start.num_steps, warm_start.stop" in what_to_do(row, has_warm_start=True)
    assert "begin with" not in what_to_do(row, has_warm_start=True)
    assert "assess.warm_start_below" in what_to_do(row, has_warm_start=False)


def test_iterations_that_lost_their_episodes_are_in_no_mean() -> None:
    rows = metrics(*range(1, 18), success=0.5)
    for row in rows[17:]:
        del row["success_rate"], row["informative_group_share"]
    row = learnt(rows)
    assert (row["is_trained"], row["num_with_signal"], row["success_rate"]) == (True, 17, 0.5)
    lost = learnt([{"iteration": number} for number in range(1, 21)])
    assert lost["success_rate"] is None
    assert "no episode was played to its end" in untrained_sentence(lost, "iteration-0020")
    assert "python -m tasks doctor" in what_to_do(lost, has_warm_start=False)


def test_a_snapshot_from_before_the_first_signal_is_untrained_in_a_trained_run(tmp_path: Path) -> None:
    row = learnt(metrics(*range(15, 21)))
    assert row["is_trained"] and row["untrained_snapshots"] == ["iteration-0010"]
    write_json(tmp_path / LEARNT_FILE, row)
    assert "before the first group of unequal rewards" in (read_untrained(tmp_path, "iteration-0010") or "")
    assert read_untrained(tmp_path, "iteration-0020") is None


def test_a_snapshot_of_weights_that_a_roll_back_put_back_learnt_what_they_had_learnt() -> None:
    """All 20 iterations had signal; 10 went back to 5, which had learnt, or to the start, from where 11 went on."""
    for rolled_back_to, untrained in ((5, []), (0, ["iteration-0010"])):
        rows = metrics(*range(1, 21))
        rows[9]["rolled_back_to"] = rolled_back_to
        row = learnt(rows)
        assert (row["is_trained"], row["untrained_snapshots"]) == (True, untrained)
        assert "is_rolled_back" not in row


def test_a_run_whose_last_iteration_went_back_to_the_start_is_untrained_whatever_it_saw() -> None:
    rows = metrics(*range(1, 21))
    rows[19]["rolled_back_to"] = 0
    row = learnt_row(rows, snapshots={"iteration-0000": 0}, drops_zero_variance=True, limit=0.95)
    assert (row["is_trained"], row["num_with_signal"], row["untrained_snapshots"]) == (False, 20, ["iteration-0000"])
    assert "rolled all back" in untrained_sentence(row, "iteration-0000")
    assert "alarms/train" in what_to_do(row, has_warm_start=False)


@pytest.mark.slow
def test_summary_and_report_call_an_untrained_champion_untrained(finished_run: Paths) -> None:
    best = build_summary(finished_run)["select"]["snapshot"]
    assert "untrained" not in build_summary(finished_run)
    write_json(
        finished_run.stage("train") / LEARNT_FILE,
        learnt_row(metrics(), snapshots={best: 20}, drops_zero_variance=True, limit=0.95),
    )
    summary = build_summary(finished_run)
    assert summary["untrained"].startswith(f"{best} is untrained: none of 20 iterations")
    stream = io.StringIO()
    print_summary(summary, finished_run, SafeConsole(file=stream, width=80))
    assert f"{best}, untrained" in stream.getvalue()
    assert f"{best} is untrained" in stream.getvalue()
    assert "is untrained: none of 20 iterations" in build_report(finished_run).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("trained", "test", "ci_high", "is_told"),
    [(0.98, 0.65, 0.79, True), (0.98, 0.9, 0.95, False), (0.98, 0.65, 0.99, False), (0.6, 0.65, 0.79, False)],
)
def test_a_snapshot_that_succeeds_much_more_often_in_training_than_on_test_knows_its_problems_by_heart(
    trained: float, test: float, ci_high: float, is_told: bool
) -> None:
    """The last ten iterations up to it count: not the first, which learn, nor those after it."""
    rows = [{"iteration": number, "success_rate": trained if 20 < number <= 30 else 0.0} for number in range(1, 41)]
    best = {"success_rate": test, "ci_high": ci_high}
    said = by_heart_sentence([*rows, {"iteration": 30}], {"best_snapshot": "iteration-0030", "test": {"best": best}})
    assert (said is not None) == is_told
    if said:
        assert "succeeds on 98% of the problems it trained on" in said and "on 65% of test" in said


def test_without_metrics_of_training_nobody_knows_what_is_known_by_heart() -> None:
    best = {"success_rate": 0.0, "ci_high": 0.1}
    assert by_heart_sentence([], {"best_snapshot": "iteration-0030", "test": {"best": best}}) is None
