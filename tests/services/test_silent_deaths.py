"""A machine that is gone in the middle of a real training: Prefect and MLflow say so, and the next run goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.pipeline.project import make_project
from tests.services.fixtures import Services
from tests.services.installation import Installation
from tests.services.servers import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.outage]
NAME = "silent-agent"


def test_a_dead_run_is_crashed_in_prefect_killed_in_mlflow_and_the_next_goes_on_inside_the_stage(
    tmp_path: Path, services: Services
) -> None:
    installation = Installation(make_project(tmp_path / "project"), services, NAME)
    installation.deploy("--pool", NAME, "--automations")
    worker = installation.worker(NAME)
    worker.start()
    run = installation.start_run()
    wait_until(lambda: list(installation.project.artifacts.glob(".resume/train/*/iteration-*")), "a checkpoint")
    assert installation.stage_run("train").info.status == "RUNNING"
    switch_machine_off(installation)

    crashed = installation.wait_for(run, "Crashed")
    assert "90 seconds" in crashed["message"]
    assert installation.parents()[0].info.status == "RUNNING"  # nobody is there to tell it
    worker.start()
    ended = installation.ended_run(installation.start_run())
    worker.stop()
    assert ended["state_name"] in ("Promoted", "Held", "Rejected"), ended["state"]
    assert [run.info.status for run in installation.parents()] == ["FINISHED", "KILLED"]
    assert "continuing after iteration" in worker.log.read_text(encoding="utf-8")


def switch_machine_off(installation: Installation) -> None:
    """kill -9 of all that works in the folder, as when the power fails."""
    while processes := installation.project.processes():
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
