"""`python -m tasks judge-check`: a labelled set, a server, and what is written, printed and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.judge_check import judge_check
from tasks.core.files import read_json, write_jsonl
from tasks.core.records import Turn
from tasks.environments.catalog import load_environment
from tasks.environments.settings import EnvironmentSettings
from tasks.tools.judge.labels import read_labels
from tests import tiny
from tests.measurement.synthetic import trajectory
from tests.profiles import profile_params
from tests.tools.judge.endpoint import Endpoint, judge_row, opinion, serve
from tests.tools.judge.injections import obedient

LABELS = Path("tasks/custom/labels.jsonl")


def row(number: int, *, booked: bool, label: bool) -> dict[str, Any]:
    """An episode that the stand-in judges by the reply of `book`."""
    event = {"tool": "book", "arguments": {"room": number}, "reply": "booked" if booked else "sold out"}
    return {
        "id": f"e{number}",
        "requests": [f"Book {number}."],
        "events": [event],
        "final_message": "D.",
        "label": label,
    }


def project(served_at: str, folder: Path, **changed: Any) -> dict[str, Any]:
    wanted = {
        "labels": str(LABELS), "evidence": "tasks/custom/judge.json", "confidence": 0.95, "min_agreement": 0.8,
        "min_kappa": 0.6,
    }  # fmt: skip
    params = profile_params("test")
    params["environment"]["judge"] = {**judge_row(served_at, folder, agreement=wanted), **changed}
    Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    return params


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [row(number, booked=number % 2 == 0, label=number % 2 == 0) for number in range(38)]
    write_jsonl(LABELS, [*rows, row(38, booked=True, label=False), row(39, booked=False, label=False)])


@pytest.mark.slow
def test_a_judge_that_agrees_is_measured_and_then_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(Endpoint(says=obedient)) as endpoint:
        params = project(endpoint.url, tmp_path)
        assert judge_check()
        evidence = read_json(Path("tasks/custom/judge.json"))
        assert evidence["measured"]["table"] == {"yes_yes": 19, "yes_no": 0, "no_yes": 1, "no_no": 20}
        assert evidence["measured"]["agreement"] == 39 / 40
        assert evidence["measured"]["kappa"] == pytest.approx(0.95)
        load_environment(EnvironmentSettings.model_validate(params["environment"])).close()
        told = capsys.readouterr().out
        assert "97.5%" in told and "Where they disagree" in told and "e38" in told and "e39" not in told
        written = Path("tasks/custom/judge.json").read_bytes()
        assert judge_check() and len(endpoint.asked) == 40  # every vote was stored
        assert Path("tasks/custom/judge.json").read_bytes() == written


@pytest.mark.slow
def test_a_judge_that_always_says_yes_is_refused_by_the_command_and_by_whoever_would_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(Endpoint(says=lambda messages, request: opinion())) as endpoint:
        params = project(endpoint.url, tmp_path)
        assert judge_check() is False
    assert read_json(Path("tasks/custom/judge.json"))["measured"]["kappa"] == 0
    assert "refused: it agrees with people on 47.5%" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the judge is refused"):
        load_environment(EnvironmentSettings.model_validate(params["environment"]))


@pytest.mark.slow
def test_an_endpoint_that_fails_measures_nothing_and_writes_nothing(tmp_path: Path) -> None:
    project("http://127.0.0.1:9/v1", tmp_path)
    with pytest.raises(ValueError, match="40 of 40 episodes could not be judged"):
        judge_check()
    assert not Path("tasks/custom/judge.json").exists()


def test_a_file_that_is_no_evidence_is_left_alone_first_of_all_the_labels(tmp_path: Path) -> None:
    params = project("http://127.0.0.1:9/v1", tmp_path)
    notes = Path("tasks/custom/notes.json")
    notes.write_text('{"judge": "mine"}', encoding="utf-8")
    for file in (LABELS, notes):
        params["environment"]["judge"]["agreement"]["evidence"] = str(file)
        Path("params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
        before = file.read_bytes()
        with pytest.raises(ValueError, match=rf"{file.name}: exists and is not what judge-check writes"):
            judge_check()
        assert file.read_bytes() == before


@pytest.mark.slow
def test_labels_that_change_while_the_judge_is_asked_are_not_those_that_were_measured(tmp_path: Path) -> None:
    def says(messages: Any, request: Any) -> Any:
        LABELS.write_text("edited", encoding="utf-8")
        return obedient(messages, request)

    with serve(Endpoint(says=says)) as endpoint:
        params = project(endpoint.url, tmp_path)
        judge_check()
    with pytest.raises(ValueError, match="was measured on other labels"):
        load_environment(EnvironmentSettings.model_validate(params["environment"]))


def test_without_a_judge_or_labels_it_says_what_to_do(tmp_path: Path) -> None:
    project("http://h/v1", tmp_path, agreement=None)
    with pytest.raises(ValueError, match=r"environment.judge.agreement is null.*Name episodes"):
        judge_check()
    Path("params.yaml").write_text(yaml.safe_dump(profile_params("test")), encoding="utf-8")
    with pytest.raises(ValueError, match=r"environment.judge is null.*Fill it in"):
        judge_check()


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row(1, booked=True, label=True)], "every label is the same"),
        ([{**row(1, booked=True, label=True), "label": "yes"}], "line 1: is no labelled episode.*label"),
        ([{"problem": {}, "trajectory": {}, "label": True}], "line 1: is no labelled episode"),
    ],
)
def test_a_set_that_shows_nothing_is_refused(rows: list[dict[str, Any]], why: str) -> None:
    write_jsonl(LABELS, rows)
    with pytest.raises(ValueError, match=why):
        read_labels(LABELS, show_reference=False)


def test_a_stored_trajectory_is_a_row_as_it_is() -> None:
    (problem,) = tiny.problems(1)
    turns = [
        Turn("calls", calls=[{"name": "book", "arguments": {"n": 1}}, {"malformed": True}], replies=["booked", "no"]),
        Turn("Booked. What else?", follow_up="Nothing."),
        Turn("Bye."),
    ]
    played = trajectory(problem.id, True, turns=turns)
    stored = {"problem": problem.model_dump(), "trajectory": played.to_row()}
    write_jsonl(LABELS, [{**stored, "label": True}, {**stored, "label": False}])
    first, _ = read_labels(LABELS, show_reference=True)
    assert first.group == problem.split_group and first.label
    assert first.judged.events == [
        {"user": played.request},  # not the words of the problem's request
        {"tool": "book", "arguments": {"n": 1}, "reply": "booked"},
        {"malformed_call": True, "reply": "no"},
        {"message": "Booked. What else?", "user": "Nothing."},
    ]
    assert first.judged.final_message == "Bye." and first.judged.reference


def test_a_stored_episode_that_ended_on_a_limit_is_no_label(tmp_path: Path) -> None:
    """No judge is asked about such an episode, so its label would say nothing of training."""
    (problem,) = tiny.problems(1)
    played = trajectory(problem.id, False, outcome="max_turns")
    played.limit = "max_turns"
    write_jsonl(LABELS, [{"problem": problem.model_dump(), "trajectory": played.to_row(), "label": False}])
    with pytest.raises(ValueError, match=r"line 1: is no labelled episode .it ended on the limit max_turns"):
        read_labels(LABELS, show_reference=False)


@pytest.mark.slow
def test_a_base_model_in_this_process_that_can_only_babble_is_measured_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every vote is a verdict; that it says nothing is what the labels show."""
    embedded = tiny.EMBEDDED.model_copy(update={"max_position_embeddings": 6000})
    base = tiny.model_folder(tmp_path / "base", embedded=embedded)
    Path("tasks/custom/rubric.md").write_text("Is it booked?", encoding="utf-8")
    params = project("", tmp_path, url=None, model=str(base), rubric="tasks/custom/rubric.md", max_output_tokens=4)
    assert judge_check() is False
    evidence = read_json(Path("tasks/custom/judge.json"))
    assert evidence["judge"]["weights"] and sum(evidence["measured"]["table"].values()) == 40
    assert "refused: it agrees with people" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the judge is refused"):
        load_environment(EnvironmentSettings.model_validate(params["environment"]))
