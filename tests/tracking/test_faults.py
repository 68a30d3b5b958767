"""A remedy fits its fault: whatever is wrong with MLflow's database or server is one line that says what to do."""

from __future__ import annotations

import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from botocore.exceptions import ClientError
from mlflow import MlflowClient
from sqlalchemy import event

from tasks.core import databases
from tasks.core.settings import Paths
from tasks.tracking import connection
from tasks.tracking.connection import connect, experiment_id, mlflow_errors
from tasks.tracking.settings import TrackingSettings
from tests.services.servers import Postgres
from tests.tracking.project import DATABASE, SETTINGS

AUTHENTICATE, PERMISSION = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD", "let this user edit"
OTHER_SERVER, ITS_LOG = "Correct tracking.uri (the address alone", "Look at its log"
JSON_FORBIDDEN = b'{"error_code": "PERMISSION_DENIED", "message": "Permission denied"}'
DNS_REBINDING = b"Invalid Host header - possible DNS rebinding attack detected"


def told_by(settings: TrackingSettings) -> str:
    """What a person reads who uses MLflow for the first time in a process."""
    with pytest.raises(ValueError) as error, mlflow_errors(settings):
        experiment_id(connect(settings), settings)
    told = str(error.value)
    assert "\n" not in told and told.startswith(f"tracking.uri = {settings.uri!r}: ")
    return told


def at(uri: str) -> TrackingSettings:
    return TrackingSettings(uri=uri, artifact_location="mlflow-artifacts:/", experiment="travel-desk", num_traces=0)


@contextmanager
def server(status: int, body: bytes, kind: str = "text/html", *headers: tuple[str, str]) -> Iterator[str]:
    """Answers everything alike; yields its URL."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            for name, value in (("content-type", kind), ("content-length", str(len(body))), *headers):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("num_retries", [0, 1])
@pytest.mark.parametrize(
    ("status", "body", "kind", "remedy"),
    [
        (401, b"You are not authenticated.", "text/html", AUTHENTICATE),
        (403, b"no", "text/html", PERMISSION),
        (403, JSON_FORBIDDEN, "application/json", PERMISSION),
        (403, DNS_REBINDING, "text/html", "--allowed-hosts"),
        (404, b"<html>", "text/html", OTHER_SERVER),
        (405, b"<html>", "text/html", OTHER_SERVER),
        (200, b"<html>a page", "text/html", OTHER_SERVER),
        (500, b"no", "text/html", ITS_LOG),
        (503, b'{"error_code": "TEMPORARILY_UNAVAILABLE", "message": "no"}', "application/json", ITS_LOG),
    ],
)
def test_a_server_that_answers_wrongly_is_not_one_that_is_to_be_started(
    project: Paths, monkeypatch: pytest.MonkeyPatch, num_retries: int, status: int, body: bytes, kind: str, remedy: str
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(num_retries))
    with server(status, body, kind) as uri:
        told = told_by(at(uri))
    assert remedy in told and "Start the server" not in told


def test_a_login_page_that_a_proxy_puts_in_the_way_is_no_mlflow(project: Paths):
    with server(302, b"", "text/html", ("Location", "/login")) as uri:
        assert OTHER_SERVER in told_by(at(uri))


def test_https_at_a_port_that_speaks_http_is_told(project: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with server(200, b"{}") as uri:
        assert "http:// in tracking.uri" in told_by(at(uri.replace("http:", "https:")))


def test_a_server_that_is_down_is_to_be_started(project: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as unused:  # held and not listened on, so that nobody else does
        unused.bind(("127.0.0.1", 0))
        assert "Start the server" in told_by(at(f"http://127.0.0.1:{unused.getsockname()[1]}"))


def test_a_host_nobody_knows_is_to_be_corrected(project: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert "Correct the host" in told_by(at("http://no-such-host.invalid:5000"))


def test_a_database_without_its_driver_names_the_package(project: Paths):
    assert "pip install pymysql" in told_by(at("mysql+pymysql://host/database"))


NO_REGISTRY = [
    "",
    "artifacts/mlruns",
    "file:///tmp/mlruns",
    "foo://x",
    "127.0.0.1:5000",
    "http:///",
    "sqlite://mlflow.db",
]


@pytest.mark.parametrize("uri", NO_REGISTRY)
def test_a_uri_behind_which_no_registry_could_be_is_refused_with_the_params(uri: str):
    with pytest.raises(ValueError, match=r"sqlite:///artifacts/mlflow/mlflow\.db, or the URL of an MLflow server"):
        at(uri)


@pytest.mark.slow
@pytest.mark.services
def test_a_postgres_that_refuses_is_told_at_once(
    project: Paths, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """MLflow alone repeats each refusal for 100 s, and writes a warning each time."""
    place = f"postgresql+psycopg://{postgres.user}@127.0.0.1:{postgres.port}"
    monkeypatch.setattr(connection, "DATABASE_PAUSES", (100.0,))
    monkeypatch.setenv("PGPASSWORD", postgres.password)
    assert "there is no database of that name" in told_by(at(f"{place}/no-such"))
    monkeypatch.setenv("PGPASSWORD", "guess-12345")
    told = told_by(at(f"{place}/postgres"))
    assert "Export PGPASSWORD" in told and "guess-12345" not in told
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_postgres_that_is_down_is_waited_for_as_long_as_a_restart_takes(
    project: Paths, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(connection, "DATABASE_PAUSES", (0.1, 0.1))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert "Start the server" in told_by(at(f"postgresql+psycopg://me@127.0.0.1:{unused.getsockname()[1]}/mlflow"))
    assert capfd.readouterr().err == ""


def test_an_answer_of_s3_that_mlflow_passes_on_is_one_line(project: Paths):
    answer = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    settings = SETTINGS.model_copy(update={"artifact_location": "s3://not-ours/mlflow"})
    with pytest.raises(ValueError, match=r"tracking\.artifact_location.*not ours"), mlflow_errors(settings):
        raise ClientError(answer, "PutObject")


def test_a_locked_database_names_no_server(project: Paths, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(databases, "WAIT_SECONDS", 0.05)
    with closing(sqlite3.connect(DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        told = told_by(SETTINGS)
    assert "fuser" in told and "server" not in told


def test_a_folder_in_the_place_of_the_database_is_told_at_once(project: Paths):
    DATABASE.unlink()
    DATABASE.mkdir()
    assert "cannot be opened" in told_by(SETTINGS)


@pytest.mark.parametrize("version", ["bda7b8c39065", "ffffffffffff"])
def test_a_database_of_another_mlflow_is_not_written_to(project: Paths, version: str):
    with closing(sqlite3.connect(DATABASE)) as other:
        other.execute("UPDATE alembic_version SET version_num = ?", (version,))
        other.commit()
    told = told_by(SETTINGS)
    assert "mlflow db upgrade" in told and "infra/locks/demo.txt" in told


def test_a_full_disk_is_to_be_freed(project: Paths, capsys: pytest.CaptureFixture[str]):
    """SQLite itself says so, at the size that the database has now."""
    client = connect(SETTINGS)
    engine = client._get_registry_client().store.engine

    def keep_size(connection: sqlite3.Connection, _: object) -> None:
        (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {num_pages}")

    engine.dispose()
    event.listen(engine, "connect", keep_size)
    try:
        with pytest.raises(ValueError, match=r"the disk is full.*Free some space"):
            make_models(client, 100)
        assert "Traceback" not in capsys.readouterr().err  # which MLflow would log beside that line
    finally:
        event.remove(engine, "connect", keep_size)
        engine.dispose()


def make_models(client: MlflowClient, number: int) -> None:
    with mlflow_errors(SETTINGS):
        for name in range(number):
            client.create_registered_model(f"model-{name}", description="x" * 4000)


def test_a_database_that_is_deleted_in_use_is_not_written_to_in_silence(project: Paths):
    client = connect(SETTINGS)
    experiment_id(client, SETTINGS)  # from here on a connection is open
    with pytest.raises(ValueError, match=r"deleted or replaced while it was in use.*Restore"), mlflow_errors(SETTINGS):
        delete_and_write(client)


def delete_and_write(client: MlflowClient) -> None:
    DATABASE.unlink()
    client.create_experiment("nobody-sees-it")


def test_an_experiment_that_was_deleted_is_to_be_restored(project: Paths):
    client = connect(SETTINGS)
    number = experiment_id(client, SETTINGS)
    client.delete_experiment(number)
    with pytest.raises(ValueError, match=rf"mlflow experiments restore --experiment-id {number}"):
        experiment_id(client, SETTINGS)
