"""Each service falls once in the middle of a run: the run ends as if nothing had happened, or in one clear line.

The stages are toys that take a blink (`tests/pipeline/toy_project.py`); the flow, promotion and tracking are real, and
so is what they speak to. A knob holds a stage while the service is down, so that each drill happens where it says.
"""

from __future__ import annotations

import time

import pytest

from tasks.core.passing_faults import PASSING_STATUS
from tasks.tracking.metrics import RUN_ID_VARIABLE, URI_VARIABLE, live_logger
from tests.pipeline.toy_project import release_knobs
from tests.services.installation import Installation, check_promoted_once, finish, hold
from tests.services.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.services, pytest.mark.outage]


def restart_over_the_end_of_the_stage(installation: Installation, server: Server, down_seconds: float) -> None:
    """The server is killed while training works, and comes back when the flow has missed it already."""
    flow = hold(installation, "train")
    with server.down():
        release_knobs(installation.project)
        time.sleep(down_seconds)
        assert flow.poll() is None, flow.communicate()
    finish(installation, flow)
    check_promoted_once(installation)


def test_postgres_restarted_under_all_servers(installation: Installation) -> None:
    restart_over_the_end_of_the_stage(installation, installation.services.postgres, 5)


def test_mlflow_down_for_a_minute_at_the_end_of_training(installation: Installation) -> None:
    restart_over_the_end_of_the_stage(installation, installation.services.mlflow, 50)


def test_prefects_server_restarted_while_the_flow_goes_on(installation: Installation) -> None:
    restart_over_the_end_of_the_stage(installation, installation.services.prefect, 10)


def test_live_metrics_are_kept_while_mlflow_is_down_and_sent_once(installation: Installation) -> None:
    mlflow = installation.services.mlflow
    client = mlflow.client()
    run = client.create_run(client.create_experiment(installation.name)).info.run_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        patch.setattr("tasks.tracking.metrics._LiveLogger.BATCH_SECONDS", 0.2)
        log = live_logger({RUN_ID_VARIABLE: run, URI_VARIABLE: mlflow.url})
        assert log is not None
        for iteration in range(1, 31):
            log({"iteration": iteration, "success_rate": iteration / 30})
            if iteration == 10:
                mlflow.kill()
            if iteration == 20:
                mlflow.start()
            time.sleep(0.2)
        log.close()  # type: ignore[attr-defined]
    steps = [item.step for item in client.get_metric_history(run, "success_rate")]
    assert sorted(steps) == list(range(1, 31))


def test_mlflow_that_never_comes_back_ends_the_run_in_one_line_and_the_next_run_ends_it(
    installation: Installation,
) -> None:
    installation.project.server["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "1"
    flow = hold(installation, "train")
    with installation.services.mlflow.down():
        release_knobs(installation.project)
        _, errors = flow.communicate(timeout=300)
    assert flow.returncode == PASSING_STATUS
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "tracking.uri" in line and "finished stages are not repeated" in line
    finish(installation, installation.project.start("flows", "run"))
    check_promoted_once(installation)


def test_prefects_server_that_never_comes_back_ends_the_run_in_one_line(installation: Installation) -> None:
    flow = hold(installation, "train")
    with installation.services.prefect.down():
        release_knobs(installation.project)
        output, errors = flow.communicate(timeout=500)
    assert flow.returncode == PASSING_STATUS
    assert len([line for line in errors.splitlines() if line.startswith("error: ")]) == 1, errors
    assert "Traceback" not in output + errors
    assert installation.champion() is None
    finish(installation, installation.project.start("flows", "run"))
    check_promoted_once(installation)
