"""What evaluate leaves and prints of a race, with episodes whose outcome is known beforehand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import read_json, read_jsonl, write_jsonl
from tasks.core.settings import Paths, load, read_params
from tasks.drift.pin import DriftCheck
from tasks.stages.evaluate import inputs as evaluate_inputs
from tasks.stages.evaluate import stage as evaluate
from tasks.stages.evaluate.settings import EvaluateSections
from tests import tiny
from tests.conftest import ROOT
from tests.measurement.synthetic import trajectory
from tests.worlds import environment_settings

PROBLEMS = tiny.problems(80)
# Of every ten problems so many are solved: the first hardly any, the next two the same ones.
SOLVED = {"iteration-0010": 1, "iteration-0020": 8, "iteration-0030": 8, "base_model": 0, "model": 5}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that evaluate printed; what it left is in `evaluated`."""
    paths = Paths(tmp_path)
    write_jsonl(paths.split("select"), (problem.model_dump() for problem in PROBLEMS))
    write_jsonl(paths.split("test"), (problem.model_dump() for problem in PROBLEMS[:20]))
    for name in ("iteration-0010", "iteration-0020", "iteration-0030"):
        (paths.stage("train") / "snapshots" / name).mkdir(parents=True)
    for model in (paths.base_model, paths.start_model):
        model.mkdir(parents=True)
    for model in (*(paths.stage("train") / "snapshots").iterdir(), *paths.artifacts.glob("*/*model")):
        (model / "weights").write_text(model.name, encoding="utf-8")
    number = {problem.id: position for position, problem in enumerate(PROBLEMS)}

    def sample_episodes(model: Path, *arguments: Any, finished: Any, **_: Any) -> Any:
        played = []
        for problem in arguments[1]:
            for sample in range(arguments[2].samples_per_problem):
                item = trajectory(problem.id, number[problem.id] % 10 < SOLVED[model.name], sample_index=sample)
                finished.add(item)
                played.append(item)
        return played

    (paths.stage("curate") / "environment.json").touch()
    monkeypatch.setattr("tasks.rollouts.collect.sample_episodes", sample_episodes)
    monkeypatch.setattr(evaluate_inputs, "check_pin", lambda *_, **__: DriftCheck("f00d", "f00d", []))
    monkeypatch.setattr("tasks.models.folders.weights_hash", lambda folder: folder.name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    params = read_params()
    params["environment"] = environment_settings().model_dump(mode="json")
    params["evaluate"]["sharded"] = None
    evaluate.run(load(EvaluateSections, params), paths)
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def evaluated(said: list[str], tmp_path: Path) -> Paths:
    return Paths(tmp_path)


@pytest.mark.slow
def test_a_dropped_snapshots_result_is_on_the_problems_it_met_and_only_the_winner_meets_test(evaluated: Paths):
    evaluation = read_json(evaluated.stage("evaluate") / "evaluation.json")
    # 80 problems: rounds end at 20, 40 and 80. Step 10 is out after the first, or the second if it was lucky.
    assert evaluation["best_snapshot"] == "iteration-0020"  # the earlier of two equals
    ((name, why),) = evaluation["racing"]["dropped"].items()
    assert (name, why["reason"], why["leader"]) == ("iteration-0010", "worse", "iteration-0020")
    assert why["p_value"] <= 0.05 / 2 / 2  # two others to lose to, two looks
    met = {snapshot: result["num_problems"] for snapshot, result in evaluation["select"].items()}
    assert met == {"iteration-0010": why["num_problems"], "iteration-0020": 80, "iteration-0030": 80}
    assert [row["num_problems"] for row in evaluation["racing"]["rounds"]] == [20, 40, 80]
    folder = evaluated.stage("evaluate") / "trajectories"
    stored = {file.stem: [row["problem_id"] for _, row in read_jsonl(file)] for file in folder.iterdir()}
    assert sorted(stored) == sorted([*(f"select_{snapshot}" for snapshot in met), "test_base", "test_best",
                                     "test_warm_start"])  # fmt: skip
    assert stored["select_iteration-0020"] == [problem.id for problem in PROBLEMS]  # in the order of the split
    assert stored["select_iteration-0010"] == [
        row.id for row in PROBLEMS if row.id in set(stored["select_iteration-0010"])
    ]
    assert len(stored["test_best"]) == 40  # two samples each


@pytest.mark.slow
def test_seconds_are_kept_beside_the_results_and_not_in_them(evaluated: Paths):
    timings = read_json(evaluated.artifacts / "timings" / "evaluate.json")
    assert {policy: row["episodes"] for policy, row in timings["test"].items()} == {
        "base": 40, "warm_start": 40, "best": 40,
    }  # fmt: skip
    assert timings["select"]["iteration-0020"]["episodes"] == 80
    assert '"seconds"' not in (evaluated.stage("evaluate") / "evaluation.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_can_be_seen_is_said_before_and_the_race_is_shown_after(said: list[str]):
    assert said[0] == "select: 3 snapshots on 20 → 40 → 80 problems × 1"
    assert re.fullmatch(r"      racing drops the best as worse in at most \d+%, for want of a", said[1])
    assert re.match(r"      place in \d+% if it leads by 1 point near 90% success, in \d+% if by 3", said[2])
    assert re.fullmatch(r"test: 20 problems of \d+ groups × 2; the smallest difference found 80% of", said[3])
    assert said[4].startswith("      the time at 95% confidence is ")
    lines = [line.rstrip() for line in said]
    assert next(line for line in lines if line.startswith("iteration-0010")).endswith("worse in round 1, −70.0 points")
    assert next(line for line in lines if line.startswith("iteration-0020")).endswith("best")
    assert max(map(len, lines)) <= 80
