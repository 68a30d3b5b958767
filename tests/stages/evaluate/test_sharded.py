"""The same problems told at once and in parts: what is paired, what the user's noise is, and what stays as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.core.files import read_jsonl
from tasks.core.records import Outcome, Trajectory
from tasks.core.settings import load, read_params
from tasks.environments.travel_desk.environment import TravelDesk
from tasks.stages.evaluate.runner import EpisodeRunner
from tasks.stages.evaluate.settings import EvaluateSections, ShardedSettings
from tasks.stages.evaluate.sharded import choose_problems, describe_drop, noise_of
from tests.conftest import ROOT
from tests.measurement.synthetic import trajectory
from tests.rollouts.test_requests import PROBLEM
from tests.stages.evaluate.stage_folder import PROBLEMS, evaluated, files_of, stage_folder
from tests.worlds import environment_settings

OPTIONS = {"reveal": "sharded", "num_problems": 5, "samples_per_problem": 1, "num_replays": 3}


def played(**of_problem: str) -> list[Trajectory]:
    """`s`: success, `f`: failure, `e`: an error of ours."""
    words: dict[str, Outcome] = {"s": "success", "f": "failure", "e": "environment_error"}
    found = [trajectory(name, letter == "s") for name, letter in of_problem.items()]
    for item, letter in zip(found, of_problem.values(), strict=True):
        item.outcome = words[letter]
    return found


def test_the_drop_is_what_the_same_problems_lose() -> None:
    row = describe_drop({"best": played(a="s", b="s", c="s", d="f")}, {"best": played(a="s", b="f", c="f", d="f")},
                        confidence=0.95)  # fmt: skip
    assert row["at_once"]["best"]["success_rate"] == 0.75 and row["results"]["best"]["success_rate"] == 0.25
    assert (row["drop"]["best"]["difference"], row["drop"]["best"]["num_problems"]) == (0.5, 4)


def test_a_user_who_repeats_itself_has_no_noise() -> None:
    noise = noise_of([played(a="s", b="f")] * 3)
    assert (noise["variance"], noise["changed_share"], noise["standard_error"]) == (0.0, 0.0, 0.0)


def test_noise_is_the_variance_between_replays_of_an_episode() -> None:
    """One of two episodes changes: variance 1/2 there, 1/4 on average, and √½ / 2 of a success rate."""
    noise = noise_of([played(a="s", b="s", c="e"), played(a="s", b="f", c="s")])
    assert (noise["num_episodes"], noise["variance"], noise["changed_share"]) == (2, 0.25, 0.5)
    assert noise["standard_error"] == pytest.approx(0.353553)
    assert noise_of([played(a="s")])["variance"] is None


def test_a_test_set_without_parts_is_refused_with_what_to_write() -> None:
    options = ShardedSettings.model_validate({**OPTIONS, "num_problems": 3})
    assert choose_problems(TravelDesk(), PROBLEMS, options) == PROBLEMS[:3]
    assert choose_problems(TravelDesk(), PROBLEMS, None) == []
    with pytest.raises(ValueError, match=r"world\.user\.shards"):
        choose_problems(TravelDesk(), [PROBLEM], options)


@pytest.mark.slow
def test_it_is_refused_before_the_first_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = stage_folder(tmp_path)
    monkeypatch.setattr(TravelDesk, "shards", lambda self, problem: ())
    monkeypatch.setattr(EpisodeRunner, "play", lambda *args, **kwargs: pytest.fail("an episode was played"))
    with pytest.raises(ValueError, match=r"world\.user\.shards"):
        evaluated(paths, greedy=False, sharded=OPTIONS)


def test_an_environment_that_judges_after_each_message_is_told_no_request_in_parts() -> None:
    params = read_params(ROOT / "params.yaml")
    params["environment"] = environment_settings("bfcl").model_dump(mode="json")
    params["evaluate"]["sharded"] = OPTIONS
    with pytest.raises(ValueError, match=r"evaluate\.sharded tells .*bfcl judges.* Set evaluate\.sharded to null"):
        load(EvaluateSections, params)


@pytest.mark.slow
def test_parts_are_a_row_of_the_evaluation_and_change_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = stage_folder(tmp_path)
    evaluated(paths, greedy=False)
    without = files_of(paths)
    evaluation = evaluated(paths, sharded=OPTIONS, greedy=False)
    lines = capsys.readouterr().out.partition("told in parts: 5 problems")[2].splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ["  base", "  warm start", "  best"]
    row = evaluation.pop("sharded")
    for name in ("base", "warm_start", "best"):
        assert evaluation["contents"].pop(f"sharded_{name}.jsonl")
    assert evaluation == json.loads(without["evaluation.json"])
    assert row["noise"] == {
        "num_replays": 3, "num_episodes": 5, "variance": 0.0, "changed_share": 0.0, "standard_error": 0.0,
    }  # fmt: skip
    assert {name: result["num_problems"] for name, result in row["at_once"].items()} == dict.fromkeys(row["drop"], 5)

    stored = [item for _, item in read_jsonl(paths.stage("evaluate") / "trajectories" / "sharded_best.jsonl")]
    desk = TravelDesk()
    for problem, item in zip(PROBLEMS[:5], stored, strict=True):
        told = [item["request"], *(turn["follow_up"] for turn in item["turns"] if turn["follow_up"])]
        assert told == desk.shards(problem)[: len(told)]
