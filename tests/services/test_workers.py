"""Workers that are killed, and workers, schedulers and workspaces that are two: nothing is lost or promoted twice.

Over toy stages (`tests/pipeline/toy_project.py`); the workers, the flow, promotion and the servers are real.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.test_kills import stage_process
from tests.pipeline.toy_project import make_toy_project, release_knobs, turn_knob
from tests.services.installation import Installation
from tests.services.servers import Worker, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.outage]

STAGES = ("curate", "assess", "warm_start", "train", "evaluate")


@pytest.fixture
def pool(installation: Installation) -> str:
    """A work pool of this test's own, and the deployments in it."""
    installation.deploy("--pool", installation.name)
    return installation.name


@pytest.fixture
def worker(installation: Installation, pool: str) -> Iterator[Worker]:
    worker = installation.worker(pool)
    with worker.running():
        yield worker


def kill_in(installation: Installation, worker: Worker, stage: str) -> None:
    """kill -9 of the worker and its flow while this stage is at work; the guardian ends the stage. The next run closes
    the dead one in Prefect and takes its turn at once.
    """
    project = installation.project
    at_work = project.artifacts / f".{stage}.pid"
    at_work.unlink(missing_ok=True)
    turn_knob(project, f"hold_{stage}")
    installation.start_run()
    is_promotion = stage == "promote"
    wait_until(lambda: stage_process(project, stage) if is_promotion else at_work.exists(), f"{stage} at work")
    worker.kill()
    release_knobs(project)
    wait_until(lambda: project.processes() == [], "the end of all that the worker started")
    worker.start()


def test_a_worker_killed_in_each_stage_costs_that_stage_alone(installation: Installation, worker: Worker) -> None:
    for stage in (*STAGES, "promote"):
        kill_in(installation, worker, stage)
    run = installation.ended_run(installation.start_run())
    assert run["state_type"] == "COMPLETED", run["state"]
    assert installation.versions() == [1] and installation.champion().version == "1"
    assert [entry["champion"] for entry in installation.promotions()] == [1]
    assert installation.project.leftovers() == []
    open_runs = [run for run in installation.parents() if run.info.status == "RUNNING"]
    assert open_runs == []
    assert {run["state_name"] for run in installation.runs()} == {"Promoted", "Crashed"}


def test_two_workers_on_one_workspace_do_the_work_once(installation: Installation, worker: Worker, pool: str) -> None:
    turn_knob(installation.project, "hold_train")
    at_work = ("RUNNING", "PENDING", "SCHEDULED")
    with installation.worker(pool).running():
        runs = [installation.start_run(), installation.start_run()]
        wait_until((installation.project.artifacts / ".train.pid").exists, "train at work")
        wait_until(lambda: any(installation.api.state(run) not in at_work for run in runs), "a skip")
        release_knobs(installation.project)
        ended = {str(run["state_name"]): run for run in map(installation.ended_run, runs)}
    assert set(ended) == {"Promoted", "Skipped"}
    assert "Traceback" not in ended["Skipped"]["state"]["message"]
    assert installation.versions() == [1]
    assert [entry["champion"] for entry in installation.promotions()] == [1]


def test_two_workers_on_two_workspaces_share_the_servers_and_nothing_else(
    installation: Installation, worker: Worker, tmp_path: Path
) -> None:
    other = Installation(make_toy_project(tmp_path / "other"), installation.services, f"{installation.name}-2")
    other.deploy("--pool", other.name)
    places = (installation, other)
    for place in places:
        turn_knob(place.project, "hold_train")
    with other.worker(other.name).running():
        runs = [place.start_run() for place in places]
        for place in places:  # both hold in training: they are at work at the same time
            wait_until((place.project.artifacts / ".train.pid").exists, f"train at work in {place.name}")
        for place, run in zip(places, runs, strict=True):
            release_knobs(place.project)
            assert place.ended_run(run)["state_name"] == "Promoted"
    for place in places:
        assert place.versions() == [1] and len(place.runs()) == 1
        assert [entry["champion"] for entry in place.promotions()] == [1]
        assert place.project.decision()["model"] == place.name


def test_two_schedulers_on_one_database_plan_each_run_once(
    installation: Installation, pool: str, tmp_path: Path
) -> None:
    second = installation.services.prefect.beside(tmp_path / "second")
    second.start()
    installation.deploy("--pool", pool, "--cron", "* * * * *")
    time.sleep(12)  # six loops of each
    deployment = installation.api.call("GET", f"/deployments/name/retrain/{installation.name}")
    wanted = {"deployments": {"id": {"any_": [deployment["id"]]}}}
    planned = installation.api.call("POST", "/flow_runs/filter", wanted)
    second.close()
    times = [run["expected_start_time"] for run in planned]
    assert len(times) >= 3 and len(times) == len(set(times))
