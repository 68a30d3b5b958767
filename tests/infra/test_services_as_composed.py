"""What infra/compose.yaml starts works: its very commands and variables, run here without containers.

Host names become loopback ports and mounted paths become folders; nothing else is changed, so a wrong flag, a variable
that a server does not read or a secret that it is not given fails here. Postgres is the machine's own program.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import pytest

from tasks.core.child_processes import ChildProcess
from tests.conftest import ROOT
from tests.infra.composition import IMAGE_ROOT, compose_text, environment, parse, words
from tests.services.servers import DIRECT, Postgres, answers, clean_environment, reserved_port, wait_until

pytestmark = [pytest.mark.flow, pytest.mark.services]
LISTENS = {"s3": "8333", "prefect": "4200", "mlflow": "5000", "worker": "8080"}
WITH_SECRETS = ["bash", str(ROOT / "infra" / "docker" / "with_secrets.sh")]


@dataclass
class Here:
    """The services of compose.yaml on this machine, under `folder`."""

    folder: Path
    postgres: Postgres
    services: dict[str, Any] = field(default_factory=lambda: parse(compose_text())["services"])
    ports: dict[str, int] = field(default_factory=dict)
    places: list[socket.socket] = field(default_factory=list)
    children: dict[str, ChildProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in LISTENS:
            self.ports[name] = self.port()
        self.secrets = self.folder / "secrets"
        subprocess.run([ROOT / "infra" / "docker" / "make_secrets.sh", self.secrets], check=True, capture_output=True)
        (self.folder / "mlflow_auth.ini").write_text(
            self.here((ROOT / "infra" / "docker" / "mlflow_auth.ini").read_text(encoding="utf-8"), "mlflow")
        )
        self.replace_secret("postgres_password", self.postgres.password)

    def port(self) -> int:
        self.places.append(reserved_port())
        return int(self.places[-1].getsockname()[1])

    def secret(self, name: str) -> str:
        return (self.secrets / name).read_text(encoding="utf-8").strip()

    def replace_secret(self, name: str, value: str) -> None:
        (self.secrets / name).unlink()
        (self.secrets / name).write_text(value, encoding="utf-8")

    def here(self, text: str, service: str) -> str:
        """A word or a variable's value with this machine's addresses and paths."""
        for name, port in self.ports.items():
            text = text.replace(f"{name}:{LISTENS[name]}", f"127.0.0.1:{port}")
        if service in LISTENS:  # its own port
            text = text.replace(LISTENS[service], str(self.ports[service]))
        replaced = {
            "postgres:5432": f"127.0.0.1:{self.postgres.port}",
            f"{IMAGE_ROOT}/infra/docker/mlflow_auth.ini": str(self.folder / "mlflow_auth.ini"),
            IMAGE_ROOT: str(ROOT),
            "/run/secrets": str(self.secrets),
            "/data": str(self.folder / "data"),
            "0.0.0.0": "127.0.0.1",
        }
        for there, here in replaced.items():
            text = text.replace(there, here)
        return text

    def environment(self, name: str) -> dict[str, str]:
        stated = {key: self.here(value, name) for key, value in environment(self.services[name]).items()}
        if "PGHOST" in stated:
            stated |= {"PGHOST": "127.0.0.1", "PGPORT": str(self.postgres.port), "PGUSER": self.postgres.user}
        home = self.folder / name
        home.mkdir(exist_ok=True)
        of_the_image = {
            "PREFECT_HOME": f"{home}/prefect",
            "PREFECT_UI_STATIC_DIRECTORY": f"{home}/ui",
            "HOME": str(home),
        }
        clean = clean_environment(**of_the_image)
        return {**{key: value for key, value in clean.items() if key not in stated}, **stated}

    def command(self, name: str) -> list[str]:
        return [*WITH_SECRETS, *(self.here(word, name) for word in words(self.services[name]))]

    def start(self, name: str, *more: str) -> None:
        command = ["env", "-C", str(self.folder / name), *self.command(name), *more]
        env = self.environment(name)
        self.children[name] = ChildProcess(command, env=env, log=self.folder / f"{name}.log", grace_seconds=0)

    def run(self, name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(name), env=self.environment(name), capture_output=True, text=True, timeout=600, check=False
        )

    def wait(self, name: str) -> None:
        """Until the health check of compose.yaml is content."""
        check = self.services[name]["healthcheck"]["test"][-1]
        wait_until(lambda: self.is_healthy(name, self.here(check, name)), f"{name} up", pause=0.3)

    def is_healthy(self, name: str, check: str) -> bool:
        assert self.children[name].is_alive(), self.log(name)[-3000:]
        return answers(check)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def url(self, name: str, path: str = "") -> str:
        return f"http://127.0.0.1:{self.ports[name]}{path}"

    def close(self) -> None:
        for child in self.children.values():
            child.stop()
        for place in self.places:
            place.close()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    postgres = Postgres()
    postgres.start()
    started = Here(tmp_path_factory.mktemp("composed"), postgres)
    try:
        (started.folder / "data").mkdir()
        names = ("master", "volume", "filer")
        others = [f"-{name}.port{kind}={started.port()}" for name in names for kind in ("", ".grpc")]
        started.start("s3", *others, f"-s3.port.grpc={started.port()}")
        started.wait("s3")
        yield started
    finally:
        started.close()
        postgres.close()


@pytest.fixture(scope="module")
def prepared(here: Here) -> Here:
    for _ in range(2):  # it is run at every start
        done = here.run("prepare")
        assert done.returncode == 0, done.stderr
    return here


@pytest.fixture(scope="module")
def running(prepared: Here) -> Here:
    servers = ["prefect", "mlflow"]
    for name in servers:
        prepared.start(name)
    for name in servers:
        prepared.wait(name)
    return prepared


def status(url: str, login: str = "", method: str = "GET", **headers: str) -> int:
    try:
        with DIRECT.open(request(url, login, method, **headers), timeout=120) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def request(url: str, login: str = "", method: str = "GET", **headers: str) -> Request:
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    return Request(url, headers=headers, method=method)


def test_each_server_has_a_database_that_no_other_may_enter(prepared: Here):
    import psycopg

    owners = prepared.postgres.query(
        "SELECT datname, pg_get_userbyid(datdba) FROM pg_database WHERE datname IN ('prefect', 'mlflow') ORDER BY 1"
    )
    assert owners == [("mlflow", "mlflow"), ("prefect", "prefect")]
    place = f"host=127.0.0.1 port={prepared.postgres.port}"
    mlflow = f"{place} user=mlflow password={prepared.secret('mlflow_database_password')}"
    psycopg.connect(f"{mlflow} dbname=mlflow").close()
    with pytest.raises(psycopg.OperationalError, match="permission denied"):
        psycopg.connect(f"{mlflow} dbname=prefect")
    with pytest.raises(psycopg.OperationalError, match="authentication failed"):
        psycopg.connect(f"{place} user=mlflow password=mlflow dbname=mlflow")


def test_the_bucket_takes_the_workers_keys_and_they_open_no_other(prepared: Here, monkeypatch: pytest.MonkeyPatch):
    import boto3
    from botocore.exceptions import ClientError

    for name, value in prepared.environment("mlflow").items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    client = boto3.Session().client("s3")
    client.put_object(Bucket="turnwise", Key="kept", Body=b"three")
    assert client.get_object(Bucket="turnwise", Key="kept")["Body"].read() == b"three"
    with pytest.raises(ClientError, match="AccessDenied"):
        client.create_bucket(Bucket="another")


def test_a_wrong_password_of_postgres_ends_the_preparation_with_one_line(here: Here, monkeypatch: pytest.MonkeyPatch):
    right = here.secret("postgres_password")
    here.replace_secret("postgres_password", "guess-2718281828")
    done = here.run("prepare")
    here.replace_secret("postgres_password", right)
    assert done.returncode == 1
    assert "PGPASSWORD" not in done.stderr and "guess" not in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "PGUSER" in done.stderr


def test_prefect_asks_for_its_password_and_keeps_its_runs_in_postgres(running: Here):
    login = running.secret("prefect_auth")
    url = running.url("prefect", "/api/admin/version")
    assert status(url) == 401
    assert status(url, "turnwise:guess") == 401
    assert status(url, login) == 200
    form = {"Content-Type": "application/json"}
    assert status(running.url("prefect", "/api/work_pools/filter"), login, "POST", **form) == 403  # no CSRF token
    tables = "SELECT count(*) FROM information_schema.tables WHERE table_schema = 'public'"
    assert running.postgres.query(tables, "prefect")[0][0] > 20
    assert status(running.url("prefect", "/")) == 200  # the page, which asks for the password itself


def test_prefect_lets_no_other_page_in(running: Here):
    asked = Request(
        running.url("prefect", "/api/admin/version"),
        headers={"Origin": "https://elsewhere.example.org", "Access-Control-Request-Method": "POST"},
        method="OPTIONS",
    )
    try:
        with DIRECT.open(asked, timeout=120) as answer:
            allowed = answer.headers.get("Access-Control-Allow-Origin")
    except HTTPError as error:
        allowed = error.headers.get("Access-Control-Allow-Origin")
    assert allowed is None


def test_mlflow_asks_for_its_password_and_has_its_users_in_postgres(running: Here):
    url = running.url("mlflow", "/api/2.0/mlflow/registered-models/search")
    assert status(url) == 401
    assert status(url, "admin:password1234") == 401  # the default of older versions
    assert status(url, f"admin:{running.secret('mlflow_admin_password')}") == 200
    users = running.postgres.query("SELECT username, is_admin FROM users ORDER BY 1", "mlflow")
    assert users == [("admin", True), ("worker", False)]
    assert status(running.url("mlflow", "/"), "admin:x", Host="elsewhere.example.org") == 403


def test_a_model_registered_by_the_worker_is_in_postgres_and_its_files_in_s3(
    running: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """By its own user, who may change what it made and nobody's rights."""
    variables = running.environment("worker") | {"MLFLOW_TRACKING_PASSWORD": running.secret("mlflow_worker_password")}
    for name, value in variables.items():
        if name.startswith(("AWS_", "MLFLOW_")):
            monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    client = MlflowClient(running.url("mlflow"), running.url("mlflow"))
    run = client.create_run(client.create_experiment("composed"))
    client.create_registered_model("agent")
    version = client.create_model_version("agent", f"{run.info.artifact_uri}/model", run.info.run_id)
    for _ in range(2):
        client.set_registered_model_alias("agent", "champion", version.version)
        client.set_registered_model_tag("agent", "lock", "held")
        client.set_model_version_tag("agent", version.version, "note", "kept")
    client.delete_registered_model_tag("agent", "lock")
    login = f"worker:{running.secret('mlflow_worker_password')}"
    assert status(running.url("mlflow", "/api/2.0/mlflow/users/get?username=admin"), login) == 403
    (tmp_path / "weights").write_text("w", encoding="utf-8")
    client.log_artifact(run.info.run_id, str(tmp_path / "weights"))
    assert run.info.artifact_uri.startswith("s3://turnwise/mlflow/")
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["weights"]
    assert running.postgres.query("SELECT count(*) FROM runs", "mlflow") == [(1,)]


def test_the_worker_makes_its_workspace_and_its_pool(running: Here):
    running.start("worker")
    running.wait("worker")
    workspace = running.folder / "worker"
    assert (workspace / "tasks").resolve() == ROOT / "tasks"
    params = (workspace / "params.yaml").read_text(encoding="utf-8")
    assert "s3://turnwise" in params and "http://mlflow:5000" in params
    login = running.secret("prefect_auth")
    wait_until(lambda: status(running.url("prefect", "/api/work_pools/turnwise"), login) == 200, "the work pool")
    pools = DIRECT.open(_as(login, running.url("prefect", "/api/work_pools/turnwise")), timeout=120)
    with pools as answer:
        assert json.load(answer)["type"] == "process"


def _as(login: str, url: str) -> Request:
    return Request(url, headers={"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"})


def test_the_worker_registers_the_flows_as_the_page_says(running: Here):
    """`docker compose exec worker …`: in its workspace, with its variables and secrets."""
    page = (ROOT / "infra" / "containers.md").read_text(encoding="utf-8")
    said = 'exec worker bash /opt/with_secrets.sh python -m flows deploy --cron "0 3 * * *"'
    assert said in page
    command = [*WITH_SECRETS, *shlex.split(said.partition("with_secrets.sh ")[2])]
    workspace = running.folder / "worker"
    done = subprocess.run(
        command, cwd=workspace, env=running.environment("worker"), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *(running.log(name)[-2000:] for name in LISTENS)])
    login = running.secret("prefect_auth")
    url = running.url("prefect", "/api/deployments/name/retrain/travel-desk-agent")
    with DIRECT.open(request(url, login), timeout=120) as answer:
        deployment = json.load(answer)
    assert deployment["work_pool_name"] == "turnwise" and str(workspace) in json.dumps(deployment["pull_steps"])
    assert [item["schedule"]["cron"] for item in deployment["schedules"]] == ["0 3 * * *"]


def test_no_log_of_a_server_has_a_secret(running: Here):
    logs = {name: running.log(name) for name in running.children}
    assert {"s3", "prefect", "mlflow"} <= set(logs)
    drawn = [file for file in running.secrets.iterdir() if not file.name.startswith("s3_")]
    values = [
        value for file in drawn for value in (running.secret(file.name), running.secret(file.name).split(":")[-1])
    ]
    keys = json.loads(running.secret("s3_identities.json"))["identities"]
    values += [known["credentials"][0]["secretKey"] for known in keys]
    assert len(values) > 10
    assert not [(name, value) for name, text in logs.items() for value in values if value in text]


def test_make_secrets_keeps_what_is_there(here: Here):
    before = {file.name: file.read_text(encoding="utf-8") for file in here.secrets.iterdir()}
    os.unlink(here.secrets / "vllm_api_key")
    subprocess.run([ROOT / "infra" / "docker" / "make_secrets.sh", here.secrets], check=True, capture_output=True)
    after = {file.name: file.read_text(encoding="utf-8") for file in here.secrets.iterdir()}
    assert after.pop("vllm_api_key") != before.pop("vllm_api_key")
    assert after == before
