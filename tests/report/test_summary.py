"""summary.json says what the stages measured, and the table says it legibly."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tasks.core.console import SafeConsole
from tasks.core.files import read_json, write_json
from tasks.core.settings import Paths
from tasks.report.summary import build_summary, print_summary
from tests.measurement.synthetic import RATES, SECONDS, add_frontier, write_artifacts

RATE_KEYS = {"success_rate", "ci_low", "ci_high", "num_problems", "samples_per_problem"}


def printed(paths: Paths, *, width: int = 80) -> str:
    stream = io.StringIO()
    print_summary(build_summary(paths), paths, SafeConsole(file=stream, width=width))
    return stream.getvalue()


@pytest.mark.slow
def test_the_summary_has_exactly_the_agreed_shape(finished_run: Paths):
    summary = build_summary(finished_run)
    assert list(summary) == [
        "baseline", "warm_start", "select", "test", "greedy", "warm_start_best_of_k", "champion", "seconds",
    ]  # fmt: skip
    assert set(summary["baseline"]) == set(summary["warm_start"]) == RATE_KEYS
    assert set(summary["select"]) == RATE_KEYS | {"snapshot"}
    assert set(summary["test"]) == RATE_KEYS | {"by_category"}
    assert set(summary["test"]["by_category"]) == set(RATES)
    assert summary["champion"] == {"model": "travel-desk-agent", "version": 1, "alias": "champion", "promoted": True}
    assert summary["seconds"] == SECONDS
    assert json.loads(json.dumps(summary)) == summary


@pytest.mark.slow
def test_base_warm_start_and_best_are_compared_on_the_same_problems(finished_run: Paths):
    summary = build_summary(finished_run)
    evaluation = read_json(finished_run.stage("evaluate") / "evaluation.json")
    for ours, theirs in (("baseline", "base"), ("warm_start", "warm_start"), ("test", "best")):
        assert summary[ours]["success_rate"] == evaluation["test"][theirs]["success_rate"]
        assert (summary[ours]["num_problems"], summary[ours]["samples_per_problem"]) == (110, 2)
    snapshot = evaluation["best_snapshot"]
    assert summary["select"]["snapshot"] == snapshot
    assert summary["select"]["success_rate"] == evaluation["select"][snapshot]["success_rate"]


@pytest.mark.slow
def test_a_category_or_model_of_any_letters_is_shown_and_does_nothing(tmp_path: Path):
    paths, category = write_artifacts(tmp_path), next(iter(RATES))
    for file, old, new in (
        (paths.stage("evaluate") / "evaluation.json", category, "[/b]ook\x1b[2J\n"),
        (paths.stage("promote") / "decision.json", "travel-desk-agent", "[red]agent[/x]\x07"),
    ):
        text = file.read_text(encoding="utf-8")
        assert json.dumps(old)[1:-1] in text
        file.write_text(text.replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1]), encoding="utf-8")
    lines = printed(paths, width=120)
    assert r"[/b]ook\x1b[2J\x0a  " in lines
    assert "[red]agent[/x] version 1 became the champion" in lines  # rich drops the bell by itself


@pytest.mark.slow
def test_a_frontier_model_has_a_row_and_what_an_episode_of_it_took(tmp_path: Path):
    paths = write_artifacts(tmp_path)
    add_frontier(paths, model="lab/big-[bold]model-of-2026-11-21")
    summary = build_summary(paths)
    assert list(summary)[-1] == "frontier"
    assert set(summary["frontier"]) == RATE_KEYS | {
        "model", "requests_per_episode", "input_tokens_per_episode", "output_tokens_per_episode", "cost_per_episode",
    }  # fmt: skip
    lines = printed(paths).splitlines()
    (row,) = [line for line in lines if "big-[bold]model-… on test" in line]
    assert row.split()[-4:] == ["96.0%", "93.0–98.0", "110", "2"]
    (took,) = [line for line in lines if "12,345" in line]
    assert took.split() == ["big-[bold]model-…", "6.0", "12,345", "412", "0.0432"]
    assert max(len(line.rstrip()) for line in lines[:12]) <= 80


def test_a_frontier_model_called_as_the_snapshot_hides_nothing(tmp_path: Path):
    paths = write_artifacts(tmp_path)
    best = build_summary(paths)["select"]["snapshot"]
    add_frontier(paths, 0.111, model=f"lab/{best}")
    rows = [line for line in printed(paths).splitlines() if line.startswith(f"{best} on test ")]
    assert len(rows) == 2 and "11.1%" not in rows[0] and "11.1%" in rows[1]


def test_a_cost_nobody_knows_is_a_dash(tmp_path: Path):
    paths = write_artifacts(tmp_path)
    add_frontier(paths, cost=None)
    (took,) = [line for line in printed(paths).splitlines() if "12,345" in line]
    assert took.split()[-1] == "–"


def test_a_held_snapshot_names_the_champion_that_stays(tmp_path: Path):
    champion = build_summary(write_artifacts(tmp_path, promoted=False))["champion"]
    assert champion == {"model": "travel-desk-agent", "version": 3, "alias": "champion", "promoted": False}


def test_without_promotion_nothing_is_claimed_of_a_champion_or_of_seconds(tmp_path: Path):
    summary = build_summary(write_artifacts(tmp_path, promoted=None))
    assert summary["champion"] == {"model": None, "version": None, "alias": None, "promoted": False}
    assert set(summary["seconds"].values()) == {None}


def test_a_decision_about_other_weights_is_not_this_runs_decision(finished_run: Paths):
    file = finished_run.stage("promote") / "decision.json"
    write_json(file, {**read_json(file), "challenger": {"snapshot": "iteration-0080", "weights": "of last week"}})
    assert build_summary(finished_run)["champion"]["promoted"] is False


def test_a_summary_before_evaluation_says_which_stage_to_run(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"evaluation\.json: does not exist.* Run `dvc repro` first.*`python -m tasks evaluate` alone"
    ):
        build_summary(Paths(tmp_path))


def test_the_table_fits_80_columns_with_every_type_on_one_line(finished_run: Paths):
    lines = printed(finished_run).splitlines()
    tables = lines[: next(i for i, line in enumerate(lines) if line.startswith("decision "))]
    assert max(len(line.rstrip()) for line in tables) <= 80
    evaluation = read_json(finished_run.stage("evaluate") / "evaluation.json")
    for category in RATES:
        (line,) = [line for line in lines if line.split()[:1] == [category]]
        rates = [
            evaluation["test"][policy]["by_category"][category]["success_rate"]
            for policy in ("base", "warm_start", "best")
        ]
        assert [float(word) for word in line.split()[1:4]] == [round(100 * rate, 1) for rate in rates]


def test_a_promotion_that_a_person_forced_says_so_and_what_the_policy_says(tmp_path: Path):
    paths = write_artifacts(tmp_path)
    file = paths.stage("promote") / "decision.json"
    decision = json.loads(file.read_text(encoding="utf-8"))
    forced = {"kind": "force", "reason": "a demo", "by": "eve@host"}
    file.write_text(json.dumps({**decision, "policy_decision": "hold", "override": forced}), encoding="utf-8")
    assert "became the champion (forced by eve@host; the policy says hold)" in printed(paths, width=120)


@pytest.mark.slow
def test_the_table_names_results_intervals_seconds_and_the_verdict(finished_run: Paths):
    text = printed(finished_run)
    test = build_summary(finished_run)["test"]
    best = f"{100 * test['success_rate']:.1f}%"
    ends = f"{100 * test['ci_low']:.1f}–{100 * test['ci_high']:.1f}"
    assert any({best, ends} <= set(line.split()) for line in text.splitlines() if " on test" in line)
    assert "95% interval" in text
    assert "178.4" in text
    assert "travel-desk-agent version 1 became the champion (promote)" in text


@pytest.mark.slow
def test_the_table_ends_with_the_places_that_exist_each_on_a_line_to_copy(finished_run: Paths):
    (finished_run.artifacts / "progress.png").touch()
    (finished_run.artifacts / "mlflow").mkdir()
    (finished_run.artifacts / "mlflow" / "mlflow.db").touch()
    lines = printed(finished_run, width=40).splitlines()
    assert "chart       artifacts/progress.png" in lines
    assert not any(line.startswith("report") for line in lines)  # not built yet
    assert lines[-1].startswith("mlflow      MLFLOW_DISABLE_TELEMETRY=true ")
    assert lines[-1].endswith("mlflow ui --host 127.0.0.1 --backend-store-uri sqlite:///artifacts/mlflow/mlflow.db")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://mlflow.example:5000/team", "https://mlflow.example:5000/team"),
        ("sqlite:///{}/other.db", "--backend-store-uri sqlite:///{}/other.db"),
        ("sqlite:///{}/gone.db", None),
        ("postgresql://db/mlflow", None),  # its password is not here
    ],
)
def test_the_place_of_mlflow_is_the_one_that_the_flow_used(finished_run: Paths, tmp_path: Path, uri: str, shown: str):
    (tmp_path / "other.db").touch()
    write_json(finished_run.artifacts / "run.json", {"seconds": {}, "cached": {}, "mlflow_uri": uri.format(tmp_path)})
    place = [line for line in printed(finished_run).splitlines() if line.startswith("mlflow ")]
    assert [line.endswith(shown.format(tmp_path)) for line in place] == [True] if shown else place == []


@pytest.mark.slow
def test_a_cached_stage_is_marked_beside_its_seconds(finished_run: Paths):
    write_json(
        finished_run.artifacts / "run.json", {"seconds": {"train": 0.4, "total": 3.0}, "cached": {"train": True}}
    )
    text = printed(finished_run)
    assert "cached" in text
    assert "–" in text  # curate's seconds are unknown, and not 0


@pytest.mark.slow
def test_a_held_snapshot_is_said_to_be_and_why_is_left_to_the_decision_that_is_named(tmp_path: Path):
    """Promote has printed the reasons a moment ago."""
    text = printed(write_artifacts(tmp_path, promoted=False))
    assert "was not promoted (hold)" in text
    assert "no clear difference" not in text
    assert "promote/decision.json" in text


@pytest.mark.slow
def test_an_artifacts_folder_named_like_markup_is_printed_as_it_is(tmp_path: Path):
    paths = write_artifacts(tmp_path / "[bold]runs")
    assert "[bold]runs/promote/decision.json" in printed(paths)


@pytest.mark.slow
def test_a_decision_that_waits_is_not_told_as_one_against_the_snapshot(tmp_path: Path):
    paths = write_artifacts(tmp_path, promoted=False)
    file = paths.stage("promote") / "decision.json"
    assert "was not promoted (hold)" in printed(paths)
    write_json(file, {**read_json(file), "approval": "waiting"})
    assert " waits for approval (hold)" in printed(paths)
