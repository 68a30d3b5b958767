"""A workspace left running: its schedule makes a champion; then nothing; changed data and a champion that fell retrain.

Over toy stages (`tests/pipeline/toy_project.py`), with a process worker, a Prefect and an MLflow server, Postgres and
S3. Its first run comes by itself, while another file's test is at work (`conftest.py`).
"""

from __future__ import annotations

import pytest

from tasks.core.files import read_json
from tests.pipeline.toy_project import DATA, release_knobs, turn_knob
from tests.services.installation import Installation
from tests.services.servers import wait_until

pytestmark = [pytest.mark.flow, pytest.mark.services]


def test_a_schedule_with_a_worker_makes_a_champion_with_nobody_there(scheduled: Installation) -> None:
    wait_until(scheduled.runs, "the scheduled run", 240, pause=1)
    run, project = scheduled.ended_run(scheduled.runs()[0]["id"]), scheduled.project
    assert run["auto_scheduled"] and run["state_name"] == "Promoted", run["state"]
    assert "reason: first" in run["tags"]
    record = read_json(project.artifacts / "run.json")
    assert record["champion"]["version"] == 1 and set(record["cached"].values()) == {False}
    assert (project.artifacts / "report" / "index.html").exists()
    assert [path for path in project.home.rglob("*") if path.is_file()] == []


def test_a_second_run_finds_nothing_to_do(scheduled: Installation) -> None:
    before = read_json(scheduled.project.artifacts / "run.json")
    run = scheduled.ended_run(scheduled.start_run())
    assert run["state_name"] == "Unchanged" and "nothing changed" in run["state"]["message"]
    assert read_json(scheduled.project.artifacts / "run.json") == before


def test_changed_data_retrains_and_the_run_says_why(scheduled: Installation) -> None:
    project = scheduled.project
    weights = project.snapshot_hashes()
    with (project.folder / DATA).open("a", encoding="utf-8") as stream:
        stream.write("p200\n")
    run = scheduled.ended_run(scheduled.start_run())
    assert run["state_name"] == "Held", run["state"]  # as good as the champion
    assert "reason: data" in run["tags"]
    assert project.snapshot_hashes() != weights


def test_a_champion_that_fell_starts_a_run_by_an_alarm_and_an_automation(scheduled: Installation) -> None:
    project = scheduled.project
    weights, seed = project.snapshot_hashes(), project.params()["seed"]
    turn_knob(project, "fail_champion")
    check = scheduled.ended_run(scheduled.start_run("drift-check"))
    assert check["state_name"] == "Fell", check["state"]
    release_knobs(project)
    wait_until(lambda: len(scheduled.runs()) == 4, "a run that the alarm starts", 240, pause=1)
    run = scheduled.ended_run(scheduled.runs()[0]["id"])
    assert run["state_type"] == "COMPLETED" and not run["auto_scheduled"], run["state"]
    assert "reason: champion_fell" in run["tags"]
    assert project.params()["seed"] == seed + 1  # with the same it would be the same model again
    assert project.snapshot_hashes() != weights


def test_in_all_of_this_one_model_was_promoted_and_once(scheduled: Installation) -> None:
    assert [entry["champion"] for entry in scheduled.promotions()] == [1]
    assert scheduled.champion().version == "1"
