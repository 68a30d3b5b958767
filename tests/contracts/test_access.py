"""Who may reach what turnwise starts, and what it never writes: every server binds the loopback, and secrets that a
user gives (variables, logins in URLs) are in no line, log, record or page.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.server import _listen, prepare_environment
from tasks.core.secrets import HIDDEN, hide_known_secrets
from tasks.core.terminal import tame_logs_and_tracebacks, tell, warn
from tests.conftest import ROOT
from tests.contracts.test_layout import files_of_the_project

WORD = "hunter2-Zq8"
SECRET = f"{WORD}/x+y"
PLANTED = {
    "MLFLOW_TRACKING_PASSWORD": f"{SECRET}1",
    "AWS_SECRET_ACCESS_KEY": f"{SECRET}2",
    "AWS_SESSION_TOKEN": f"{SECRET}3",
    "PREFECT_API_AUTH_STRING": f"me:{SECRET}4",
    "PGPASSWORD": f"{SECRET}5",
    "HF_TOKEN": f"{SECRET}6",
    "OPENAI_API_KEY": f"{SECRET}7",
}
RECORD_IN_MLFLOW = """
from tasks.core.settings import load, load_paths, read_params
from tasks.tracking.runs import FlowRuns
from tasks.tracking.settings import TrackingSections

params = read_params()
runs = FlowRuns(load(TrackingSections, params).tracking, params, load_paths(params))
runs.begin()
runs.begin_stage("curate")
runs.end_stage("curate", cached=False, seconds=1.0)
runs.fail("FAILED")
"""
# Containers have a network of their own: what they listen on is published on the loopback (tests/infra).
IN_CONTAINERS = ("infra/compose.yaml", "infra/kubernetes/", "infra/.env.example", "infra/decisions/")


def test_nothing_listens_on_every_address():
    texts = {
        str(file): (ROOT / file).read_text(encoding="utf-8")
        for file in files_of_the_project()
        if file.parts[0] in ("flows", "tasks", "infra", "Makefile", "README.md") and file.suffix != ".png"
    }
    everywhere = re.compile(r"0\.0\.0\.0|\[::\]|bind\(\(\"\"|host=\"\"|--host=?\s*::")
    open_to_all = [name for name, text in texts.items() if everywhere.search(text)]
    assert [name for name in open_to_all if not name.startswith(IN_CONTAINERS)] == []
    assert "infra/compose.yaml" in open_to_all  # the search finds what is there
    bound = [place for text in texts.values() for place in re.findall(r"\.bind\(\(([^,]+),", text)]
    assert bound and not set(bound) - {'"127.0.0.1"', "LOOPBACK"}


def test_servers_of_ours_listen_on_the_loopback_or_on_no_port():
    with _listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    sources = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("flows/server.py", "tasks/report/summary.py")
    }
    assert "fd=int(sys.argv[1])" in sources["flows/server.py"]  # uvicorn is given that socket
    assert (
        '"mlflow"' in sources["tasks/report/summary.py"]
        and '"--host", "127.0.0.1"' in sources["tasks/report/summary.py"]
    )
    vllm = (ROOT / "tasks" / "engines" / "vllm" / "server_process.py").read_text(encoding="utf-8")
    assert '"--uds"' in vllm and '"--port"' not in vllm


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    return [value.rpartition(":")[2] for value in PLANTED.values()]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"https://me:{WORD}@host:5000/api is not there", "https://[redacted]@host:5000/api is not there"),
        (f"https://{WORD}@host is not there", "https://[redacted]@host is not there"),
        (f"postgresql+psycopg://me:{SECRET}@db/mlflow", "postgresql+psycopg://[redacted]@db/mlflow"),
        (f"s3://key:{SECRET}@bucket/data", "s3://[redacted]@bucket/data"),
        (f"GET http://host/data?X-Amz-Signature={SECRET} failed", "GET http://host/data?[redacted] failed"),
        (f"GET http://host/data?page=2&api_key={SECRET}&n=1 failed", "GET http://host/data?[redacted] failed"),
    ],
)
def test_a_login_or_a_key_in_a_url_is_hidden_and_the_rest_of_the_line_is_kept(line: str, shown: str):
    assert hide_known_secrets(line) == shown


@pytest.mark.parametrize(
    "line",
    [
        "http://127.0.0.1:4200/api",
        "models:/travel-desk-agent@champion",
        "git@host:project",
        "s3://bucket/a@b?versionId=1",
    ],
)
def test_an_address_without_a_secret_is_shown_as_it_is(line: str, planted: list[str]):
    assert hide_known_secrets(line) == line


def test_time_grows_with_the_length_of_a_text_and_not_with_its_square():
    hostile = ["b.", "a-", "oracle-", "://", "a://b:c", "a://b?", "a://?passw", "a://?a=&", "http://a", "a@"]
    begun = time.thread_time()
    for piece in hostile:
        text = piece * (200_000 // len(piece))
        assert len(hide_known_secrets(text)) == len(text)
        assert hide_known_secrets(f"{text} s3://key:word@bucket").endswith(" s3://[redacted]@bucket")
    assert time.thread_time() - begun < 20  # of the processor; one of them took a minute


def test_no_printed_line_log_record_or_traceback_has_a_secret(planted: list[str], capfd: pytest.CaptureFixture[str]):
    factory, hook = logging.getLogRecordFactory(), sys.excepthook
    tame_logs_and_tracebacks()
    try:
        for secret in planted:
            tell(f"the server said: {secret}")
            warn(f"the server said: {json.dumps({'key': secret})}")
            logging.getLogger("a library").warning("key=%s", secret)
            try:
                raise RuntimeError(f"refused {secret}")
            except RuntimeError as error:
                sys.excepthook(RuntimeError, error, error.__traceback__)
    finally:
        logging.setLogRecordFactory(factory)
        sys.excepthook = hook
    shown = "".join(capfd.readouterr())
    assert shown.count(HIDDEN) >= 3 * len(planted)
    assert not [secret for secret in planted if secret in shown]


def test_an_address_of_prefect_with_a_password_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PREFECT_API_URL", f"http://me:{WORD}@host:4200/api")
    with pytest.raises(ValueError, match="PREFECT_API_AUTH_STRING") as caught:
        prepare_environment(tmp_path, shows_log=False)
    assert WORD not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_result_of_a_run_has_a_secret(finished_folder: Path, planted: list[str]):
    """After a stage and its MLflow run with all of them set: lines, params, tags, provenance, problems and pages."""
    proxies = {"HTTPS_PROXY": f"http://me:{WORD}8@127.0.0.1:9", "NETRC": str(finished_folder / ".netrc")}
    lines = ""
    for command in (["-m", "dvc", "repro", "--single-item", "curate"], ["-c", RECORD_IN_MLFLOW]):
        done = subprocess.run(
            [sys.executable, *command], cwd=finished_folder, env={**os.environ, **proxies},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        lines += done.stdout + done.stderr
        assert done.returncode == 0, lines
    files = [file for file in (finished_folder / "artifacts").rglob("*") if file.is_file()]
    assert {"card.html", "curate.json", "train.jsonl", "mlflow.db"} <= {file.name for file in files}
    texts = {str(file): file.read_bytes() for file in (*files, finished_folder / "dvc.lock")}
    assert b"environment.name" in texts[str(finished_folder / "artifacts" / "mlflow" / "mlflow.db")]  # params as text
    assert [name for name, text in {**texts, "lines": lines.encode()}.items() if WORD.encode() in text] == []


@pytest.fixture
def finished_folder(tmp_path: Path) -> Path:
    from tests.pipeline.project import make_project

    folder = make_project(tmp_path / "project").folder
    (folder / ".netrc").write_text(f"machine host login me password {SECRET}9\n", encoding="utf-8")
    return folder
