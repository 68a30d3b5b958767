"""The baseline gate: what an interval calls for, when more episodes are played, and what `skip_rl` leaves behind."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.core.console import SafeConsole
from tasks.core.files import read_json, read_jsonl, write_json, write_jsonl
from tasks.core.records import Trajectory
from tasks.core.resume import resume_root
from tasks.core.settings import Paths, load, read_params
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.folders import folder_hash, merged_snapshot, resolve_model
from tasks.models.settings import on_cpu
from tasks.models.trained_on import TrainedOn, read_trained_on
from tasks.report.summary import build_summary, print_summary
from tasks.stages.assess import base_model
from tasks.stages.assess import stage as assess
from tasks.stages.assess.gate import answer, decide, look_confidence, plan_looks, read_look
from tasks.stages.assess.settings import AssessSettings
from tasks.stages.train import stage as train
from tests import tiny
from tests.conftest import ROOT
from tests.measurement.synthetic import BASELINE, trajectory
from tests.stages.evaluate.stage_folder import ENVIRONMENT, evaluated
from tests.stages.evaluate.test_evaluate import paths
from tests.tools.user.test_model import end_messages, user
from tests.worlds import environment_settings

__all__ = ["paths"]
OPTIONS = AssessSettings(
    samples_per_problem=1,
    num_problems=4,
    max_episodes=100,
    warm_start_below=0.2,
    skip_rl_above=0.9,
    confidence=0.95,
)


def episodes(num_won: int, num_problems: int) -> list[Trajectory]:
    return [trajectory(f"p{number}", number < num_won) for number in range(num_problems)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 0.19, "warm_start"),
        (0.1, 0.2, "need_more_evidence"),
        (0.2, 0.89, "rl"),
        (0.5, 0.9, "need_more_evidence"),
        (0.9, 1.0, "skip_rl"),
        (0.1, 0.95, "need_more_evidence"),
    ],
)
def test_the_answer_is_sure_only_where_no_threshold_is_inside_the_interval(low: float, high: float, expected: str):
    assert answer(low, high, OPTIONS) == expected


def test_without_a_threshold_no_model_is_too_good_and_at_0_none_too_weak():
    assert answer(0.97, 1.0, OPTIONS.model_copy(update={"skip_rl_above": None})) == "rl"
    assert answer(0.0, 0.05, OPTIONS.model_copy(update={"warm_start_below": 0.0})) == "rl"


def test_more_evidence_is_more_problems_and_then_more_samples_up_to_the_limit():
    assert plan_looks(OPTIONS, 10) == [(4, 1), (8, 1), (10, 1), (10, 2), (10, 4), (10, 8)]  # 10 × 16 is above 100
    assert plan_looks(OPTIONS.model_copy(update={"max_episodes": 1}), 10) == [(4, 1)]
    assert plan_looks(OPTIONS, 3)[0] == (3, 1)


def test_each_of_several_looks_is_surer_so_that_all_of_them_are_as_sure_as_stated():
    # 60 of 100 in one look at 95% is 0.502 to 0.691; in one of five, 99%, 0.471 to 0.716: that is what is reported.
    alone, _ = read_look(episodes(60, 100), OPTIONS, confidence=look_confidence(OPTIONS, 1))
    result, row = read_look(episodes(60, 100), OPTIONS, confidence=look_confidence(OPTIONS, 5))
    assert (alone["ci_low"], alone["ci_high"]) == pytest.approx((0.5020, 0.6906), abs=1e-4)
    assert (result["ci_low"], result["ci_high"]) == pytest.approx((0.4714, 0.7163), abs=1e-3)
    assert (row["ci_low"], row["ci_high"], row["answer"]) == (result["ci_low"], result["ci_high"], "rl")


@pytest.mark.parametrize(
    ("num_won", "gate", "says"),
    [
        (3, "warm_start", r"assess.warm_start_below \(20%\) is inside .* the estimate itself is below it\.$"),
        (5, "rl", r"assess.warm_start_below \(20%\) is inside .* the estimate itself is not below it\.$"),
        (19, "rl", r"assess.skip_rl_above \(90%\) is inside .* skipping RL would need evidence\.$"),
    ],
)
def test_at_the_limit_the_gate_says_what_it_decided_without_evidence_and_why(num_won: int, gate: str, says: str):
    _, row = read_look(episodes(num_won, 20), OPTIONS, confidence=0.95)
    decision = decide([row], OPTIONS, confidence=0.95)
    assert (row["answer"], decision["gate"], decision["has_evidence"]) == ("need_more_evidence", gate, False)
    assert "assess.max_episodes (100) gave too little evidence" in decision["reason"]
    assert re.search(says, decision["reason"])


def test_thresholds_that_overlap_are_refused():
    params = read_params(ROOT / "params.yaml")
    params["assess"]["skip_rl_above"] = 0.1
    with pytest.raises(ValueError, match=r"assess: .*skip_rl_above \(0.1\) is not above warm_start_below \(0.2\)"):
        load(assess.AssessSections, params)


def run_assess(paths: Paths, monkeypatch: pytest.MonkeyPatch, wins: Callable[[int], bool], **options: Any) -> Any:
    """assess with episodes whose outcome is known by their problem's number; counts those that were played."""
    played: list[int] = []

    def sample_episodes(*arguments: Any, finished: Any, **_: Any) -> list[Trajectory]:
        rows, samples_per_problem = arguments[2], arguments[3].samples_per_problem
        before = len(finished)
        for number, problem in enumerate(rows):
            for sample in range(samples_per_problem):
                if (problem.id, sample) not in finished:
                    finished.add(trajectory(problem.id, wins(number), sample_index=sample))
        played.append(len(finished) - before)
        return list(finished.read((row.id, sample) for row in rows for sample in range(samples_per_problem)))

    monkeypatch.setattr("tasks.rollouts.collect.sample_episodes", sample_episodes)
    checked: list[int] = []
    monkeypatch.setattr(assess, "prepare_base_model", lambda folder, *_: folder.mkdir())
    monkeypatch.setattr(assess, "check_budgets", lambda *_: checked.append(len(played)))
    monkeypatch.setattr(assess, "check_pin", lambda *_, **__: None)
    params = read_params(ROOT / "params.yaml")
    params["environment"] = ENVIRONMENT.model_dump(mode="json")
    params["assess"] = {**OPTIONS.model_dump(), **options}
    for name in ("demonstrations", "references", "train"):  # what it depends on, and here never reads
        (paths.stage("curate") / f"{name}.jsonl").touch()
    (paths.stage("curate") / "environment.json").touch()
    assess.run(load(assess.AssessSections, params), paths)
    assert checked == [0], "budgets are checked once, before an episode is played"
    return played, read_json(paths.stage("assess") / "baseline.json")


def test_assess_plays_on_until_the_interval_is_clear_and_plays_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every second of 60 problems is solved. 50% of 4 and of 8 could still be 20%; of 16, at 99%, it is 23% to 77%."""
    paths = Paths(tmp_path)
    write_jsonl(paths.split("select"), (problem.model_dump() for problem in tiny.problems(60)))
    played, baseline = run_assess(paths, monkeypatch, lambda number: number % 2 == 0)
    assert plan_looks(OPTIONS, 60) == [(4, 1), (8, 1), (16, 1), (32, 1), (60, 1)]
    looks = baseline["decision"]["looks"]
    assert [row["answer"] for row in looks] == ["need_more_evidence"] * 2 + ["rl"]
    assert (baseline["gate"], baseline["decision"]["has_evidence"], baseline["num_problems"]) == ("rl", True, 16)
    assert played == [4, 4, 8]
    assert len(list(read_jsonl(paths.stage("assess") / "trajectories.jsonl"))) == 16
    assert "gate: rl. The base model succeeds on 50.0% of 16 problems × 1" in capsys.readouterr().out
    assert not (paths.artifacts / ".resume" / "assess").exists()


def test_the_embedded_model_says_that_it_has_seen_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder that says nothing would be one of which nobody knows."""

    def build(folder: Path, **_: Any) -> None:
        folder.mkdir()

    monkeypatch.setattr("tasks.models.embedded.build_embedded_model", build)
    monkeypatch.setattr(base_model, "embedded_texts", lambda *_: [])
    settings = load(assess.AssessSections, read_params(ROOT / "params.yaml"))
    base_model.prepare_base_model(tmp_path / "base_model", settings, Paths(tmp_path), TravelDesk())
    assert read_trained_on(tmp_path / "base_model") == TrainedOn()


@pytest.mark.slow
def test_the_base_itself_plays_the_user_while_it_is_assessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """By the folder of model.path: that of assess does not exist before assess has ended."""
    end_messages(monkeypatch)
    paths = Paths(tmp_path / "artifacts")
    embedded = tiny.EMBEDDED.model_copy(update={"max_position_embeddings": 900})
    base = tiny.model_folder(tmp_path / "base", embedded=embedded)
    problems = tiny.problems(2)
    write_jsonl(paths.split("select"), (problem.model_dump() for problem in problems))
    for name in ("demonstrations", "references", "train"):
        (paths.stage("curate") / f"{name}.jsonl").touch()
    (paths.stage("curate") / "environment.json").touch()
    monkeypatch.setattr(assess, "check_budgets", lambda *_: None)
    monkeypatch.setattr(assess, "check_pin", lambda *_, **__: None)
    params = read_params(ROOT / "params.yaml")
    asked = user(None, model=str(base), max_output_tokens=5, max_messages=2, temperature=1.0)
    params["environment"] = environment_settings(user=asked).model_dump(mode="json")
    params["model"]["path"] = str(base)
    params["compute"]["num_threads"] = 1
    params["sampling"] = {**tiny.SAMPLING.model_dump(), "max_tokens_per_episode": 400}
    params["assess"] = {**OPTIONS.model_dump(), "num_problems": 2, "max_episodes": 2}
    assess.run(load(assess.AssessSections, params), paths)
    rows = [row for _, row in read_jsonl(paths.stage("assess") / "trajectories.jsonl")]
    assert [row["outcome"] for row in rows] != ["environment_error"] * 2
    assert all(row["request"] not in (problem.requests[0] for problem in problems) for row in rows)
    assert "gate:" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")
def test_skip_rl_passes_the_base_on_and_every_later_stage_goes_through(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from tasks.report.chart import progress_chart

    base = resolve_model(paths.base_model)
    write_json(paths.stage("assess") / "baseline.json", {**BASELINE, "gate": "skip_rl"})
    params = read_params(ROOT / "params.yaml")
    params["environment"] = ENVIRONMENT.model_dump(mode="json")
    # The fixture's snapshot is the base itself; it makes way for what train writes.
    kept = base.rename(paths.artifacts / "kept")
    for pointer in ("assess/base_model", "warm_start/model"):
        write_json(paths.artifacts / pointer / "pointer.json", {"path": str(kept), "folder_hash": folder_hash(kept)})
    checkpoint = resume_root("train", paths) / "of-an-earlier-gate" / "checkpoint-0001"
    checkpoint.mkdir(parents=True)
    train.run(load(train.TrainSections, params), paths)
    assert not checkpoint.exists()
    assert "so the model is passed on untrained" in capsys.readouterr().out
    (snapshot,) = (paths.stage("train") / "snapshots").iterdir()
    assert (snapshot.name, resolve_model(snapshot)) == ("iteration-0000", kept)
    assert merged_snapshot(snapshot, paths.artifacts / "merged", compute=on_cpu(1)) == kept

    evaluation = evaluated(paths, None)
    assert evaluation["best_snapshot"] == "iteration-0000"
    assert len(set(evaluation["weights"].values())) == 1
    assert evaluation["gain_over_warm_start"]["difference"] == 0.0
    summary, stream = build_summary(paths), io.StringIO()
    print_summary(summary, paths, SafeConsole(file=stream, width=80))
    assert "iteration-0000, untrained" in stream.getvalue()
    assert summary["untrained"].startswith("iteration-0000 is untrained: the baseline gate said skip_rl")
    assert progress_chart(paths, paths.artifacts / "progress.png").exists()
    assert json.dumps(summary)
