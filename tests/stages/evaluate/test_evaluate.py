"""evaluate with a frontier model: it meets `test`, is compared with the best snapshot, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.core.files import read_jsonl
from tasks.core.settings import Paths, load, read_params
from tasks.core.tool_calls import call_text
from tasks.stages.evaluate.noted import read_evaluations
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.promote.allowance import holdout_set
from tests.conftest import ROOT
from tests.engines.endpoint.chat_endpoint import KEY, VARIABLE, ChatEndpoint, settings
from tests.stages.evaluate.stage_folder import PROBLEMS, evaluated, files_of, stage_folder

SOLVED = PROBLEMS[:9]  # by the endpoint; the tiny model with random weights solves none


def scripts() -> dict[str, list[str]]:
    """Nine reference solutions, and three answers without any work."""
    written = {problem.requests[0]: ["It is done."] for problem in PROBLEMS}
    for problem in SOLVED:
        (turn,) = problem.reference
        written[problem.requests[0]] = [*map(call_text, turn.calls), turn.answer]
    return written


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return stage_folder(tmp_path)


@pytest.mark.slow
def test_a_frontier_model_is_a_yardstick_and_nothing_else(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """9 of 12 problems solved; a problem takes one request a call and one for the answer, each of 100 tokens in and 10
    out, at 2 and 10 a million.
    """
    monkeypatch.setenv(VARIABLE, KEY)
    evaluated(paths, None)
    without = files_of(paths)
    with ChatEndpoint(scripts()).serving() as url:
        evaluation = evaluated(paths, settings(url).model_dump(mode="json"))
    frontier = evaluation.pop("frontier")
    assert evaluation["contents"].pop("test_frontier.jsonl")
    assert evaluation == json.loads(without["evaluation.json"])
    (noted,) = read_evaluations(paths)  # both evaluations played the same
    assert (noted.episodes, len(noted.problem_ids)) == (evaluation["contents"]["test_best.jsonl"], 12)
    assert noted.test == holdout_set(paths).sha256
    assert {name: content for name, content in files_of(paths).items() if name in without} == {
        **without, "evaluation.json": files_of(paths)["evaluation.json"],
    }  # fmt: skip

    result, usage = frontier["result"], frontier["usage_per_episode"]
    assert (result["success_rate"], result["num_problems"]) == (0.75, 12)
    assert result["ci_low"] < 0.75 < result["ci_high"]
    requests = sum(len(problem.reference[0].calls) + 1 for problem in SOLVED) + 3
    assert usage == {
        "requests": pytest.approx(requests / 12, abs=1e-6),
        "input_tokens": pytest.approx(100 * requests / 12, abs=1e-4),
        "output_tokens": pytest.approx(10 * requests / 12, abs=1e-5),
        "cost": pytest.approx(requests * (200 + 100) / 1e6 / 12, abs=1e-8),
    }
    assert result["mean_sampled_tokens"] == usage["output_tokens"]
    assert frontier["best_minus_frontier"]["difference"] == -0.75
    assert (frontier["model"], frontier["temperature"], frontier["is_reproducible"]) == ("lab/m", 0.0, False)
    stored = [row for _, row in read_jsonl(paths.stage("evaluate") / "trajectories" / "test_frontier.jsonl")]
    assert [row["problem_id"] for row in stored] == [problem.id for problem in PROBLEMS]
    assert not [name for name, content in files_of(paths).items() if KEY.encode() in content]
    assert KEY not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_models_may_be_measured_with_another_distribution_than_they_are_trained_with(paths: Paths) -> None:
    """Cut to the likeliest token, which is then certain; the evaluation says so, since promote goes by it."""
    assert evaluated(paths, None)["sampling"] == {"temperature": 1.0, "top_p": 1.0}
    cut = {"temperature": 0.7, "top_p": 1e-6}
    assert evaluated(paths, None, sampling=cut)["sampling"] == cut
    for _, row in read_jsonl(paths.stage("evaluate") / "trajectories" / "test_best.jsonl"):
        (tokens,) = row["sequences"]
        assert tokens["sampler_logp"] == [0.0] * len(tokens["token_ids"])


@pytest.mark.slow
def test_a_key_that_is_not_set_stops_the_stage_before_any_model_is_loaded(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"the environment variable {VARIABLE}, which is not set"):
        evaluated(paths, settings("http://127.0.0.1:9/v1").model_dump(mode="json"))
    assert not paths.stage("evaluate").exists()


def test_the_settings_of_a_frontier_model_are_checked_like_all_others() -> None:
    params = read_params(ROOT / "params.yaml")
    whole = settings("http://127.0.0.1:9/v1").model_dump(mode="json")
    for wrong, says in (
        ({"temperatur": 0.0}, r"evaluate\.frontier\.temperatur is not a setting"),
        ({"url": "localhost"}, r"evaluate\.frontier\.url = 'localhost' is refused"),
        ({"max_concurrent_episodes": 0}, r"evaluate\.frontier\.max_concurrent_episodes = 0 is refused"),
    ):
        params["evaluate"]["frontier"] = {**whole, **wrong}
        with pytest.raises(ValueError, match=says):
            load(EvaluateSections, params)


@pytest.mark.slow
def test_greedy_episodes_take_the_likeliest_token_and_change_no_other_result(paths: Paths) -> None:
    """An untrained model solves nothing either way; the shape and the independence are what counts."""
    without = evaluated(paths, None, greedy=False)
    assert without["greedy"] == {}
    found = evaluated(paths, None, greedy=True)
    assert set(found.pop("greedy")) == {"base", "warm_start", "best"}
    assert found == {name: value for name, value in without.items() if name != "greedy"}
