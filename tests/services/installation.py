"""One workspace on services alone: its registry in MLflow, the copy of its files on S3, its runs on a Prefect server.

`Installation` is what a person would set up: params.yaml with the addresses, the environment with passwords and keys,
the deployments, and a worker that runs them.
"""

from __future__ import annotations

import subprocess
from typing import Any

from tests.pipeline.prefect_api import PrefectApi
from tests.pipeline.project import Project
from tests.pipeline.toy_project import release_knobs, turn_knob
from tests.services.fixtures import Services
from tests.services.servers import Worker, clean_environment, wait_until

POOL = "turnwise"
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
RUN_SECONDS = 600


class Installation:
    """A project on the services, under a model name of its own."""

    def __init__(self, project: Project, services: Services, name: str):
        self.project, self.services, self.name = project, services, name
        project.server = {**services.prefect.variables(), **services.store.variables()}
        project.set_params(
            {
                "paths.remote": f"s3://{services.store.bucket}/{name}",
                "storage.endpoint_url": services.store.endpoint,
                "tracking.uri": services.mlflow.url,
                "tracking.artifact_location": f"mlflow-artifacts:/{name}",
                "tracking.experiment": name,
                "promote.model_name": name,
            }
        )
        self.api = PrefectApi(services.prefect.url.removesuffix("/api"), services.prefect.password)

    def deploy(self, *arguments: str) -> str:
        return self.project._succeed("flows", "deploy", *arguments)

    def worker(self, pool: str = POOL) -> Worker:
        variables = clean_environment(**{**self.project.environment(), **self.project.server})
        return Worker(self.project.folder, variables, pool, self.project.folder.parent / f"{self.name}-worker.log")

    def start_run(self, flow: str = "retrain", **parameters: Any) -> str:
        """What `prefect deployment run` does; the run's id."""
        deployment = self.api.call("GET", f"/deployments/name/{flow}/{self.name}")
        body = {"parameters": parameters}
        return str(self.api.call("POST", f"/deployments/{deployment['id']}/create_flow_run", body)["id"])

    def ended_run(self, run: str) -> dict[str, Any]:
        """The run, once it is over; its log is printed, for a test that expected another end."""
        wait_until(lambda: self.api.state(run) in ENDED, f"the end of run {run}", RUN_SECONDS, pause=0.5)
        ended = dict(self.api.call("GET", f"/flow_runs/{run}"))
        print(f"run {run}: {ended['state_name']}: {ended['state']['message']}", *self.api.log(run), sep="\n")
        return ended

    def state(self, run: str) -> dict[str, Any]:
        return dict(self.api.call("GET", f"/flow_runs/{run}")["state"])

    def wait_for(self, run: str, name: str) -> dict[str, Any]:
        """The run's state, once it has this name; another end fails the test at once."""

        def is_there() -> bool:
            state = self.state(run)
            return state["name"] == name or state["type"] in ENDED

        wait_until(is_there, f"run {run} as {name}", RUN_SECONDS, pause=0.5)
        state = self.state(run)
        assert state["name"] == name, state
        return state

    def runs(self, flow: str = "retrain") -> list[dict[str, Any]]:
        """Every run of the deployment that has begun, the newest first."""
        deployment = self.api.call("GET", f"/deployments/name/{flow}/{self.name}")
        wanted = {"deployments": {"id": {"any_": [deployment["id"]]}}, "sort": "START_TIME_DESC"}
        found = self.api.call("POST", "/flow_runs/filter", wanted)
        return [run for run in found if run["start_time"]]

    def champion(self) -> Any:
        """The registry's version under the alias, or None."""
        from mlflow.exceptions import MlflowException

        try:
            return self.services.mlflow.client().get_model_version_by_alias(self.name, "champion")
        except MlflowException:
            return None

    def versions(self) -> list[int]:
        found = self.services.mlflow.client().search_model_versions(f"name = '{self.name}'")
        return sorted(int(version.version) for version in found)

    def parents(self) -> list[Any]:
        """The runs of the flow in MLflow, the newest first."""
        return self._mlflow_runs("tags.kind = 'flow'")

    def stage_run(self, stage: str) -> Any:
        """The newest run of a stage in MLflow."""
        return self._mlflow_runs(f"tags.stage = '{stage}'")[0]

    def _mlflow_runs(self, where: str) -> list[Any]:
        client = self.services.mlflow.client()
        experiment = client.get_experiment_by_name(self.name)
        order = ["attributes.start_time DESC"]
        return list(client.search_runs([experiment.experiment_id], where, order_by=order))

    def metric_steps(self, stage: str, key: str) -> list[int]:
        """Of the run that has them: a stage that was not repeated names it."""
        run = self.stage_run(stage)
        source = run.data.tags.get("source_run_id", run.info.run_id)
        history = self.services.mlflow.client().get_metric_history(source, key)
        return sorted(item.step for item in history)

    def promotions(self) -> list[dict[str, Any]]:
        """The entries of the registry's journal that made a champion."""
        from tasks.tracking.aliases import open_registry
        from tasks.tracking.journal import read_journal
        from tasks.tracking.settings import TrackingSettings

        settings = TrackingSettings.model_validate(self.project.params()["tracking"])
        return [dict(entry.body) for entry in read_journal(open_registry(settings, self.name)).of("promotion")]


def hold(installation: Installation, stage: str) -> subprocess.Popen[str]:
    """A flow in the background that waits in this stage."""
    turn_knob(installation.project, f"hold_{stage}")
    at_work = installation.project.artifacts / f".{stage}.pid"
    flow = installation.project.start("flows", "run")
    wait_until(lambda: at_work.exists() or flow.poll() is not None, f"{stage} at work")
    assert flow.poll() is None, flow.communicate()
    return flow


def finish(installation: Installation, flow: subprocess.Popen[str]) -> str:
    release_knobs(installation.project)
    output, errors = flow.communicate(timeout=300)
    assert flow.returncode == 0, output + errors
    return output + errors


def check_promoted_once(installation: Installation) -> None:
    """One version and one champion; every metric of training once; the run closed. All over toy stages."""
    assert [int(entry["champion"]) for entry in installation.promotions()] == [1]
    assert installation.champion().version == "1"
    assert installation.versions() == [1]
    assert installation.metric_steps("train", "success_rate") == list(range(1, 11))
    assert installation.parents()[0].info.status == "FINISHED"
