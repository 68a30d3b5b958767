"""Two agents of one installation: each has its own results and champion, and nothing is shared but the registry."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.core.files import read_json
from tests.pipeline.prefect_api import PrefectApi
from tests.pipeline.project import Project
from tests.pipeline.toy_project import CODE, DATA, make_toy_project

pytestmark = pytest.mark.flow
AGENTS = ("shop", "desk")


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_toy_project(tmp_path_factory.mktemp("installation") / "code")


def make_workspace(installation: Project, name: str) -> Project:
    """One with the installation's own command; its registry is the one of all."""
    folder = installation.folder.parent / name
    made = installation.run("tasks", "workspace", "new", str(folder), "--profile", "test", "--model", name)
    assert made.returncode == 0, made.stderr
    for file in (CODE, DATA):
        shutil.copy(installation.folder / file, folder)
    (folder / "knobs").mkdir(exist_ok=True)
    workspace = Project(folder)
    registry = installation.folder.parent / "registry"
    workspace.set_params(
        {"tracking.uri": f"sqlite:///{registry}/mlflow.db", "tracking.artifact_location": f"{registry}/{name}"}
    )
    return workspace


def test_two_agents_train_at_once_each_to_its_own_champion(
    installation: Project, prefect: dict[str, str], databases: Path
):
    registry = installation.folder.parent / "registry"
    shutil.copytree(databases / "mlflow", registry)
    workspaces = [make_workspace(installation, name) for name in AGENTS]
    installation.server = prefect
    before = {path.name for path in installation.folder.iterdir()}
    runs = [installation.start("flows", "--workspace", str(workspace.folder), "run") for workspace in workspaces]
    outputs: list[str] = []
    for run in runs:
        output, errors = run.communicate(timeout=300)
        assert run.returncode == 0, output + errors
        outputs.append(output)

    api = PrefectApi(prefect["PREFECT_API_URL"].removesuffix("/api"), prefect["PREFECT_API_AUTH_STRING"])
    client = MlflowClient(f"sqlite:///{registry}/mlflow.db", f"sqlite:///{registry}/mlflow.db")
    for name, workspace in zip(AGENTS, workspaces, strict=True):
        champion = client.get_model_version_by_alias(name, "champion")
        run = client.get_run(champion.run_id)
        assert (str(champion.version), client.get_experiment(run.info.experiment_id).name) == ("1", name)
        assert workspace.decision()["model"] == name
        assert read_json(workspace.artifacts / "run.json")["champion"]["version"] == 1
        parent = client.get_run(read_json(workspace.artifacts / "run.json")["mlflow_run_id"])
        (flow_run,) = api.call("POST", "/flow_runs/filter", {"flow_runs": {"name": {"any_": [parent.info.run_name]}}})
        steps = api.call("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}})
        assert f"{name} train" in {step["name"] for step in steps}
        assert not [tag for tag in flow_run["tags"] if tag.startswith("profile: ")]
    for output, workspace in zip(outputs, workspaces, strict=True):  # as the shell, elsewhere, finds them
        assert f"{workspace.artifacts}/report/index.html" in output
        assert f": {workspace.artifacts}/promote/decision.html" in output
        assert not [word for word in output.split() if word.startswith("artifacts/")], output
    assert {path.name for path in installation.folder.iterdir()} == before  # the code's folder has no result

    limits = api.call("POST", "/v2/concurrency_limits/filter", {})
    assert {limit["name"].rpartition("-")[0]: limit["limit"] for limit in limits}.items() >= {
        "shop": 1,
        "desk": 1,
    }.items()

    again = installation.run("flows", "--workspace", str(workspaces[0].folder), "run")
    assert again.returncode == 0 and "nothing changed" in again.stdout.lower(), again.stdout + again.stderr
    deployed = installation.run("flows", "--workspace", str(workspaces[1].folder), "deploy", "--cron", "0 3 * * *")
    assert deployed.returncode == 0, deployed.stderr
    deployment = api.call("GET", "/deployments/name/retrain/desk")
    assert [
        step["prefect.deployments.steps.set_working_directory"]["directory"] for step in deployment["pull_steps"]
    ] == [str(workspaces[1].folder)]
