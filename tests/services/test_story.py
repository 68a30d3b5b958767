"""A workspace left running: its schedule makes a champion; then nothing; changed data and a champion that fell retrain.

Over toy stages (`tests/pipeline/toy_project.py`), with a process worker, a Prefect and an MLflow server, Postgres and
S3. While the first run waits for its minute, the real stages show that services give the same model as a folder does.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tasks.core.files import read_json
from tests.pipeline.project import Project, make_project
from tests.pipeline.toy_project import DATA, make_toy_project, release_knobs, turn_knob
from tests.services.fixtures import Services
from tests.services.installation import Installation
from tests.services.servers import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.services]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, services: Services) -> Iterator[Installation]:
    """A workspace with its deployments, a worker, a schedule and the automations."""
    installation = Installation(make_toy_project(tmp_path_factory.mktemp("story") / "project"), services, "story")
    installation.deploy("--cron", cron_soon(), "--automations")
    with installation.worker().running():
        yield installation
    for process in installation.project.processes():
        process.kill()


def cron_soon() -> str:
    """A minute that begins in 20 to 80 s: the deployments and the worker are there by then."""
    due = datetime.now(UTC).astimezone() + timedelta(seconds=80)
    return f"{due.minute} * * * *"


@pytest.mark.usefixtures("installation")
def test_the_same_recipe_in_a_folder_and_on_services_gives_the_same_weights_and_the_same_decision(
    finished: Project, services: Services, tmp_path_factory: pytest.TempPathFactory
) -> None:
    on_services = Installation(make_project(tmp_path_factory.mktemp("same") / "project"), services, "same-recipe")
    on_services.project.flow()
    assert on_services.project.snapshot_hashes() == finished.snapshot_hashes()
    assert on_services.project.evaluation() == finished.evaluation()
    there, here = on_services.project.decision(), finished.decision()
    for part in ("decision", "reasons", "comparison", "challenger"):
        assert there[part] == here[part]


def test_a_schedule_with_a_worker_makes_a_champion_with_nobody_there(installation: Installation) -> None:
    wait_until(installation.runs, "the scheduled run", 240, pause=1)
    run, project = installation.ended_run(installation.runs()[0]["id"]), installation.project
    assert run["auto_scheduled"] and run["state_name"] == "Promoted", run["state"]
    assert "reason: first" in run["tags"]
    record = read_json(project.artifacts / "run.json")
    assert record["champion"]["version"] == 1 and set(record["cached"].values()) == {False}
    assert (project.artifacts / "report" / "index.html").exists()
    assert [path for path in project.home.rglob("*") if path.is_file()] == []


def test_a_second_run_finds_nothing_to_do(installation: Installation) -> None:
    before = read_json(installation.project.artifacts / "run.json")
    run = installation.ended_run(installation.start_run())
    assert run["state_name"] == "Unchanged" and "nothing changed" in run["state"]["message"]
    assert read_json(installation.project.artifacts / "run.json") == before


def test_changed_data_retrains_and_the_run_says_why(installation: Installation) -> None:
    project = installation.project
    weights = project.snapshot_hashes()
    with (project.folder / DATA).open("a", encoding="utf-8") as stream:
        stream.write("p200\n")
    run = installation.ended_run(installation.start_run())
    assert run["state_name"] == "Held", run["state"]  # as good as the champion
    assert "reason: data" in run["tags"]
    assert project.snapshot_hashes() != weights


def test_a_champion_that_fell_starts_a_run_by_an_alarm_and_an_automation(installation: Installation) -> None:
    project = installation.project
    weights, seed = project.snapshot_hashes(), project.params()["seed"]
    turn_knob(project, "fail_champion")
    check = installation.ended_run(installation.start_run("drift-check"))
    assert check["state_name"] == "Fell", check["state"]
    release_knobs(project)
    wait_until(lambda: len(installation.runs()) == 4, "a run that the alarm starts", 240, pause=1)
    run = installation.ended_run(installation.runs()[0]["id"])
    assert run["state_type"] == "COMPLETED" and not run["auto_scheduled"], run["state"]
    assert "reason: champion_fell" in run["tags"]
    assert project.params()["seed"] == seed + 1  # with the same it would be the same model again
    assert project.snapshot_hashes() != weights


def test_in_all_of_this_one_model_was_promoted_and_once(installation: Installation) -> None:
    assert [entry["champion"] for entry in installation.promotions()] == [1]
    assert installation.champion().version == "1"
