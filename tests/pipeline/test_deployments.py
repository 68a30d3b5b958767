"""The three deployments as `flows deploy` registers them, what their form shows, and what is refused first.

Prefect is imported by the first test that needs it: two seconds that only one worker spends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from tasks.core.passing_faults import PASSING_STATUS
from tasks.pipeline.cli_errors import TELEMETRY_OFF
from tests.pipeline.prefect_api import PrefectApi
from tests.pipeline.project import Project
from tests.pipeline.toy_project import make_toy_project

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

NAMES = ("retrain", "drift-check", "evaluate-snapshot")
SCHEDULES = ("--cron", "0 3 * * *", "--check-cron", "30 * * * *")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, prefect: dict[str, str]) -> Project:
    project = make_toy_project(tmp_path_factory.mktemp("deploy") / "project")
    project.set_params({"promote.model_name": "deployed agent"})
    project.server = prefect
    return project


@pytest.fixture(scope="module")
def api(prefect: dict[str, str]) -> PrefectApi:
    return PrefectApi(prefect["PREFECT_API_URL"].removesuffix("/api"), prefect["PREFECT_API_AUTH_STRING"])


def deploy(project: Project, *options: str) -> list[str]:
    """The lines of `flows deploy`, which must succeed."""
    done = project.run("flows", "deploy", "--pool", "deployed", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def first(project: Project) -> list[str]:
    """What the first `flows deploy` of the project said."""
    return deploy(project, *SCHEDULES, "--automations")


def refused(project: Project, *options: str) -> str:
    done = project.run("flows", "deploy", *options)
    assert done.returncode in (1, PASSING_STATUS)
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.slow
def test_a_second_deploy_changes_nothing_and_says_so(project: Project, first: list[str], api: PrefectApi):
    assert [line.partition(", next run")[0] for line in first if ": created" in line] == [
        "work pool deployed: created",
        *(f"{name}/deployed agent: created" for name in NAMES),
        "automation crash: created",
        "automation retrain: created",
    ]
    assert sum("export TURNWISE_" in line for line in first) == 2  # nobody has said where to notify and to reload
    before = deployments(api)
    second = deploy(project, *SCHEDULES, "--automations")
    assert sum(": unchanged" in line for line in second) == 6
    assert [bool(re.search(r", next run: \w+ \d{4}-\d\d-\d\d 03:00 \w+$", line)) for line in second[1:4]] == [
        True,
        False,  # each hour at 30
        False,  # on demand
    ]
    assert not any("updated" in line or "created" in line for line in second)
    assert deployments(api) == before
    schedules = [[item["schedule"]["cron"] for item in row["schedules"]] for row in before.values()]
    assert schedules == [["0 3 * * *"], ["30 * * * *"], []]
    assert all(
        row["job_variables"] == {"env": {**TELEMETRY_OFF, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}}
        for row in before.values()
    )


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_another_schedule_is_an_update_and_none_leaves_it(project: Project, api: PrefectApi):
    assert line_of_retrain(deploy(project, "--cron", "0 4 * * *")).startswith("updated (schedule), next run: ")
    assert line_of_retrain(deploy(project)).startswith("unchanged, next run: ")
    retrain = deployments(api)["retrain"]
    assert [item["schedule"]["cron"] for item in retrain["schedules"]] == ["0 4 * * *"]
    # At once, though this server has no scheduler: one of its own comes within a minute, too late for what is due.
    planned = api.call("POST", "/deployments/get_scheduled_flow_runs", {"deployment_ids": [retrain["id"]]})
    assert len(planned) >= 3


@pytest.fixture
def each_two_minutes(prefect_client: SyncPrefectClient) -> Iterator[UUID]:
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    from flows.cron import read_schedule

    schedule = DeploymentScheduleCreate(schedule=read_schedule("--cron", "*/2 * * * *"))
    flow = prefect_client.create_flow_from_name("each-two-minutes")
    made = prefect_client.create_deployment(flow, "of a test", schedules=[schedule])
    yield made
    prefect_client.delete_deployment(made)


@pytest.mark.slow
def test_the_run_that_was_due_while_prefect_started_is_the_first_and_the_one_that_is_told(
    prefect_client: SyncPrefectClient, each_two_minutes: UUID
):
    from flows.cron import next_run, read_schedule
    from flows.deployments import schedule_runs

    begun, due = datetime(2026, 1, 1, 2, 7, 30, tzinfo=UTC), datetime(2026, 1, 1, 2, 8, tzinfo=UTC)
    schedule = read_schedule("--cron", "*/2 * * * *")
    assert schedule is not None and next_run(schedule, begun) == due
    for _ in range(2):  # a second time adds none
        schedule_runs(prefect_client, each_two_minutes, since=begun)
    planned = prefect_client.get_scheduled_flow_runs_for_deployments([each_two_minutes], limit=2)
    assert [run.next_scheduled_start_time for run in planned] == [due, due.replace(minute=10)]


@pytest.mark.slow
@pytest.mark.parametrize("paused", ["deployment", "schedule"])
def test_no_run_is_planned_for_what_somebody_paused(
    prefect_client: SyncPrefectClient, each_two_minutes: UUID, paused: str
):
    from prefect.client.schemas.actions import DeploymentUpdate

    from flows.deployments import schedule_runs

    if paused == "deployment":
        prefect_client.update_deployment(each_two_minutes, DeploymentUpdate(paused=True))
    else:
        (schedule,) = prefect_client.read_deployment(each_two_minutes).schedules
        prefect_client.update_deployment_schedule(each_two_minutes, schedule.id, active=False)
    schedule_runs(prefect_client, each_two_minutes)
    assert [run for run in prefect_client.read_flow_runs() if run.deployment_id == each_two_minutes] == []


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_what_people_set_on_the_servers_page_stays(project: Project, api: PrefectApi):
    """Another schedule is still an update, and the one that was paused stays paused."""
    before = deployments(api)["retrain"]
    (schedule,) = before["schedules"]
    env = {**before["job_variables"]["env"], "HF_HOME": "/big", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60"}
    del env["DVC_NO_ANALYTICS"]  # as one that an older turnwise did not set
    ours: dict[str, Any] = {"job_variables": {"env": env, "image": "ours:gpu"}, "tags": ["a"], "description": "ours"}
    api.call("PATCH", f"/deployments/{before['id']}", ours)
    api.call("PATCH", f"/deployments/{before['id']}/schedules/{schedule['id']}", {"active": False})

    assert line_of_retrain(deploy(project)) == "updated (job_variables), its schedule is paused"
    assert line_of_retrain(deploy(project, "--cron", "0 5 * * *")) == "updated (schedule), its schedule is paused"
    after = deployments(api)["retrain"]
    ours["job_variables"]["env"]["DVC_NO_ANALYTICS"] = "1"
    assert {key: after[key] for key in ours} == ours
    assert [(item["schedule"]["cron"], item["active"]) for item in after["schedules"]] == [("0 5 * * *", False)]


@pytest.mark.parametrize("before", [{}, {"env": None}, {"env": {"HF_HOME": "/big"}}])
def test_a_job_gets_the_variables_it_needs_whatever_was_there(before: dict[str, Any]) -> None:
    from flows.deployments import JOB_ENVIRONMENT, _complete

    assert _complete(before) == {"env": {**JOB_ENVIRONMENT, **(before.get("env") or {})}}


def line_of_retrain(lines: list[str]) -> str:
    return next(line for line in lines if line.startswith("retrain/")).removeprefix("retrain/deployed agent: ")


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_another_folder_with_a_model_of_that_name_is_refused(project: Project, prefect: dict[str, str], tmp_path: Path):
    other = make_toy_project(tmp_path / "other")
    other.set_params({"promote.model_name": "deployed agent"})
    other.server = prefect
    line = refused(other, "--pool", "deployed")
    assert str(project.folder) in line
    assert "promote.model_name" in line


@pytest.mark.slow
def test_a_deployment_that_is_taken_over_from_a_folder_that_is_gone_names_both(
    prefect_client: SyncPrefectClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from flows import deployments as module

    monkeypatch.setattr(module, "read_params", lambda: {"promote": {"model_name": "moved agent"}})
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    planned = module.plan_deployments(None, None)
    for folder, told in ((old, "created"), (old, "unchanged"), (new, f"updated (folder: {old} → {new})")):
        lines = list(module.register(planned, pool="moved", pool_type="process", folder=folder))
        assert lines[1:] == [f"{name}/moved agent: {told}" for name in NAMES]


@pytest.mark.slow
@pytest.mark.usefixtures("first")
def test_what_cannot_work_is_one_line_and_registers_nothing(project: Project, api: PrefectApi, prefect: dict[str, str]):
    before = deployments(api)
    assert "--type process" in refused(project, "--pool", "deployed", "--type", "kubernetes")
    assert "'each night' is not a cron expression" in refused(project, "--check-cron", "each night")
    try:
        project.server = {**prefect, "PREFECT_API_AUTH_STRING": "turnwise:guess"}
        line = refused(project)
        assert "refuses the password" in line
        assert "guess" not in line
        project.server = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}
        assert "does not answer" in refused(project)
        project.server = {}
        assert "PREFECT_API_URL names no server" in refused(project)
    finally:
        project.server = prefect
    assert deployments(api) == before


def deployments(api: PrefectApi) -> dict[str, dict[str, Any]]:
    """What a person could have noticed, by flow."""
    rows = {name: api.call("GET", f"/deployments/name/{name}/deployed%20agent") for name in NAMES}
    volatile = ("updated", "last_polled", "status")
    return {name: {key: row[key] for key in row if key not in volatile} for name, row in rows.items()}


def test_the_form_shows_profile_reason_and_force_with_what_they_mean():
    from flows.drift_check import drift_check
    from flows.evaluate_snapshot import evaluate_snapshot
    from flows.parameters import AS_IT_IS, profile_names
    from flows.retrain import retrain

    shown = retrain.parameters.properties
    assert list(shown) == ["profile", "reason", "force"]
    assert all(row["description"] for row in shown.values())
    assert shown["profile"]["enum"] == [AS_IT_IS, *profile_names()]
    assert "demo" in profile_names()
    assert retrain.should_validate_parameters
    assert "is_shown" not in {**drift_check.parameters.properties, **evaluate_snapshot.parameters.properties}


@pytest.mark.parametrize(("name", "value"), [("profile", "dmo"), ("reason", "x" * 1001), ("force", "maybe")])
def test_a_value_that_the_form_would_refuse_is_refused_by_the_flow_too(name: str, value: str):
    from flows.retrain import retrain

    with pytest.raises(Exception, match=name):
        retrain.validate_parameters({name: value})


def test_a_reason_of_two_lines_becomes_one():
    from flows.retrain import retrain

    assert retrain.validate_parameters({"reason": "new data\nfrom today"})["reason"] == "new data from today"


def test_deployments_have_the_name_of_the_model_as_far_as_prefect_takes_it(monkeypatch: pytest.MonkeyPatch):
    from flows.deployments import plan_deployments

    monkeypatch.setattr("flows.deployments.read_params", lambda: {"promote": {"model_name": "R&D <agent>"}})
    planned = plan_deployments("0 3 * * *", None)
    assert [item.full_name for item in planned] == [f"{name}/R-D -agent-" for name in NAMES]
    assert [item.schedule is not None for item in planned] == [True, False, False]


@pytest.mark.parametrize("cron", ["every day", "61 * * * *", "", "* * *", "0 0 3 * * *", "0 0 30 2 *", "@reboot"])
def test_a_schedule_that_is_no_cron_expression_is_refused_with_its_option(cron: str):
    """Six fields would be every day of the third month at midnight, with seconds last; 30 February never comes."""
    from flows.cron import read_schedule

    with pytest.raises(ValueError, match=r"--check-cron .* is not a cron expression"):
        read_schedule("--check-cron", cron)


@pytest.mark.parametrize("name", ["", " ", "gpu/large", "r&d", "<pool>", "50%"])
def test_a_pool_name_prefect_does_not_take_is_refused_in_one_line_before_the_server_is_asked(name: str):
    from flows.deployments import check_pool

    with pytest.raises(ValueError, match=rf"^--pool '{name}' cannot be the name"):
        check_pool(name)
    check_pool("turnwise gpu-2")


def test_two_folders_of_one_model_are_two_workspaces_and_one_folder_is_one(tmp_path: Path):
    from flows.turn import workspace_name

    here, there = workspace_name("my agent!", tmp_path / "a"), workspace_name("my agent!", tmp_path / "b")
    assert here != there
    assert here == workspace_name("my agent!", tmp_path / "b" / ".." / "a")
    assert here.startswith("my-agent-")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("Asia/Tokyo", "Asia/Tokyo"),
        ("Europe/London", "Europe/London"),
        ("UTC0", "Etc/UTC"),
        ("JST-9", None),
        ("GMT0BST,M3.5.0/1,M10.5.0", None),  # as UTC in winter, an hour off in summer
        ("UTC+3UTC,M3.5.0/1,M10.5.0", None),  # as UTC in summer
    ],
)
def test_a_schedule_is_in_the_machines_time_zone_and_a_rule_without_a_name_is_no_utc(
    given: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.cron import read_schedule

    with monkeypatch.context() as patch:
        patch.setenv("TZ", given)
        time.tzset()
        patch.setattr("flows.cron.get_localzone_name", lambda: told or "Etc/UTC")  # as tzlocal takes a rule
        if told is None:
            with pytest.raises(ValueError, match=rf"^TZ={re.escape(given)} is a rule.*Set TZ to a name"):
                read_schedule("--cron", "0 3 * * *")
        else:
            schedule = read_schedule("--cron", "0 3 * * *")
            assert schedule is not None
            assert schedule.timezone == told
    time.tzset()
