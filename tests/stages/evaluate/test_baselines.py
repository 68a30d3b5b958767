"""Policies without a model: what they score on a split, and where a person reads it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks.core.console import SafeConsole
from tasks.core.files import read_json, write_json, write_jsonl
from tasks.core.records import Problem, Trajectory
from tasks.core.settings import Paths
from tasks.drift.pin import DriftCheck
from tasks.environments.bfcl.environment import BFCL
from tasks.environments.bfcl.problems import Turns, problems
from tasks.environments.bfcl.settings import BFCLCategory, BFCLSettings
from tasks.environments.settings import EnvironmentSettings
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.models.settings import on_cpu
from tasks.report.build import build_report
from tasks.report.summary import build_summary, print_summary
from tasks.rollouts.finished import FinishedEpisodes
from tasks.stages.evaluate import inputs as evaluate_inputs
from tasks.stages.evaluate import stage as evaluate
from tasks.stages.evaluate.scripted_baselines import measure_baselines
from tasks.tools.base import Answer, EnvironmentFault
from tasks.tools.wrappers import EnvironmentWrapper, EpisodeWrapper
from tests import tiny
from tests.conftest import ROOT
from tests.engine_benches import engine_settings
from tests.measurement.synthetic import trajectory, write_artifacts
from tests.worlds import environment_settings

pytestmark = pytest.mark.slow
BASE: BFCLCategory = "multi_turn_base"


def solved(turns: Turns) -> dict[str, int]:
    results = measure_baselines(BFCL(), problems(BASE, turns), confidence=0.95)
    assert {result["num_problems"] for result in results.values()} == {200}
    return {name: round(200 * result["success_rate"]) for name, result in results.items()}


def test_the_ground_truth_solves_all_first_requests_looking_around_27_and_nothing_none() -> None:
    assert solved("first") == {"ground_truth": 200, "blind_read_only": 27, "empty": 0}


def test_a_whole_conversation_is_hardly_ever_won_by_looking_around() -> None:
    assert solved("all") == {"ground_truth": 200, "blind_read_only": 1, "empty": 0}


def test_a_baseline_is_measured_as_a_model_is() -> None:
    four = problems(BASE, "first")[:4]  # ground truths of 3, 4, 1 and 2 calls, all solved: Wilson's 4 of 4
    result = measure_baselines(BFCL(), four, confidence=0.95)["ground_truth"]
    assert (result["success_rate"], result["ci_low"], result["ci_high"]) == (1.0, 0.510109, 1.0)
    assert result["mean_calls"] == sum(len(problem.reference[0].calls) for problem in four) / 4
    assert (result["samples_per_problem"], result["mean_sampled_tokens"]) == (1, 0.0)
    assert sorted(result["by_category"]) == sorted({problem.category for problem in four})


def test_looking_around_calls_what_is_shown_and_no_tool_that_a_later_request_announces() -> None:
    problem = problems("multi_turn_miss_func", "all")[0]
    looks = BFCL().baselines(problem)["blind_read_only"]
    names = [call.name for call in looks[0].calls]
    assert len(looks) == len(problem.requests) and {"ls", "pwd"} < set(names)
    hidden = problem.model_copy(update={"world": {**problem.world, "held_out": {"3": ["ls"]}}})
    assert "ls" not in [call.name for call in BFCL().baselines(hidden)["blind_read_only"][0].calls]


class FailsFirst(EnvironmentWrapper):
    """Down for the first `times` calls."""

    def __init__(self, times: int):
        super().__init__(BFCL())
        self.left = times

    def start(self, problem: Problem, *, stream: str = "") -> Any:
        return FailingEpisode(self, problem, stream)


class FailingEpisode(EpisodeWrapper):
    """An episode of it."""

    def __init__(self, world: FailsFirst, problem: Problem, stream: str):
        super().__init__(world.inner.start(problem, stream=stream))
        self.world = world

    def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        self.world.left -= 1
        if self.world.left >= 0:
            raise EnvironmentFault("is down", tool=name)
        return self.inner.call(name, arguments)


def test_a_fault_of_ours_is_tried_again_and_then_left_out() -> None:
    four = problems(BASE, "first")[:4]
    absorbed = measure_baselines(FailsFirst(2), four, confidence=0.95)["ground_truth"]  # three attempts an episode
    assert (absorbed["success_rate"], absorbed["num_problems"]) == (1.0, 4)
    lost = measure_baselines(FailsFirst(3), four, confidence=0.95)["ground_truth"]
    assert (lost["success_rate"], lost["num_problems"]) == (1.0, 3)
    assert lost["outcomes"]["environment_error"] == 0.25


def test_a_world_that_names_none_has_none() -> None:
    assert measure_baselines(TravelDesk(), tiny.problems(3), confidence=0.95) == {}


def evaluated(
    environment: EnvironmentSettings, rows: list[Problem], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """evaluation.json of a run whose models answer every problem wrong."""
    paths = Paths(folder)
    for split in ("select", "test"):
        write_jsonl(paths.split(split), (row.model_dump() for row in rows))
    for model in (
        paths.stage("train") / "snapshots" / "iteration-0001",
        paths.base_model,
        paths.start_model,
    ):
        model.mkdir(parents=True)

    def played(*_: Any, finished: FinishedEpisodes, **__: Any) -> list[Trajectory]:
        trajectories = [trajectory(row.id, False, category=row.category) for row in rows]
        for item in trajectories:
            finished.add(item)
        return trajectories

    (paths.stage("curate") / "environment.json").touch()
    monkeypatch.setattr("tasks.rollouts.collect.sample_episodes", played)
    monkeypatch.setattr(evaluate_inputs, "check_pin", lambda *_, **__: DriftCheck("f00d", "f00d", []))
    monkeypatch.setattr("tasks.models.folders.weights_hash", lambda folder: "c2")
    whole = {
        "seed": 0, "compute": on_cpu(1), "environment": environment,
        "engine": engine_settings("transformers"), "sampling": tiny.SAMPLING,
        "evaluate": {
            "greedy": False, "select_samples_per_problem": 1, "test_samples_per_problem": 1, "confidence": 0.95,
            "power": 0.8,
            "racing": None, "frontier": None, "sampling": None, "also": [], "reflexion": None, "sharded": None,
        },
    }  # fmt: skip
    evaluate.run(evaluate.EvaluateSections.model_validate(whole), paths)
    return dict(read_json(paths.stage("evaluate") / "evaluation.json"))


def test_evaluate_stores_baselines_of_test_where_the_world_has_any_and_no_key_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    bfcl = environment_settings("bfcl", settings=BFCLSettings(categories=[BASE], turns="first"))
    with_some = evaluated(bfcl, list(problems(BASE, "first")[:10]), tmp_path / "bfcl", monkeypatch)
    assert {name: result["success_rate"] for name, result in with_some["baselines"].items()} == {
        "ground_truth": 1.0,
        "blind_read_only": 0.2,
        "empty": 0.0,
    }
    without = evaluated(environment_settings(), tiny.problems(10), tmp_path / "desk", monkeypatch)
    assert set(with_some) - set(without) == {"baselines"}


def test_summary_table_and_report_show_them_beside_the_models(tmp_path: Path) -> None:
    paths = write_artifacts(tmp_path / "run")
    file = paths.stage("evaluate") / "evaluation.json"
    without = (build_report(paths).read_bytes(), build_summary(paths))
    baselines = measure_baselines(BFCL(), problems(BASE, "first"), confidence=0.95)
    write_json(file, {**read_json(file), "baselines": baselines})

    summary, stream = build_summary(paths), io.StringIO()
    assert {name: result["success_rate"] for name, result in summary["baselines"].items()} == {
        "ground_truth": 1.0,
        "blind_read_only": 0.135,
        "empty": 0.0,
    }
    assert {name: value for name, value in summary.items() if name != "baselines"} == without[1]
    print_summary(summary, paths, SafeConsole(file=stream, width=80))
    (line,) = [line for line in stream.getvalue().splitlines() if line.startswith("blind read only")]
    assert line.split()[3:] == ["13.5%", "8.2–21.4", "200", "no", "model"]
    page = build_report(paths).read_text(encoding="utf-8")
    assert "Without a model, on the same problems:" in page and "blind read only 13.5% (8.2–21.4)" in page
    assert b"Without a model" not in without[0]
