"""Passwords, keys and tokens that a flow is given are in nothing that it leaves: files, logs, databases, S3."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.pipeline.toy_project import release_knobs, turn_knob
from tests.services.fixtures import Services
from tests.services.installation import Installation

pytestmark = [pytest.mark.slow, pytest.mark.outage]
PLANTED = {
    name: f"planted+{name.lower()}/0123456789"
    for name in (
        "MLFLOW_TRACKING_PASSWORD", "OPENAI_API_KEY", "HF_TOKEN", "PGPASSWORD", "MY_MCP_SERVER_TOKEN", "SSH_PASSPHRASE",
    )
}  # fmt: skip
HOOKS = {
    "TURNWISE_NOTIFY_URL": "https://hooks.example.org/services/planted-notify-0123456789",
    "TURNWISE_RELOAD_URL": "https://me:planted-reload-0123456789@serving.example.org/reload?token=planted-query-0123456789",
}


def forms(secret: str) -> Iterator[bytes]:
    """As it is, in a URL, and as HTTP's basic authentication writes it."""
    for text in (secret, quote(secret, safe="")):
        yield text.encode()
    yield base64.b64encode(secret.encode()).rstrip(b"=")


def written(installation: Installation, services: Services) -> Iterator[tuple[str, bytes]]:
    """(where, bytes) of everything: the project and its home, both databases, S3, the servers' logs."""
    folder = installation.project.folder
    for root in (folder, installation.project.home, services.prefect.folder, services.mlflow.folder):
        for file in root.rglob("*"):
            if (
                file.is_file() and not file.is_symlink() and "tests" not in file.parts
            ):  # this file is in the project too
                yield str(file), file.read_bytes()
    for database in ("prefect", "mlflow"):
        names = services.postgres.query("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", database)
        for (name,) in names:
            rows = services.postgres.query(f'SELECT t::text FROM "{name}" t', database)
            yield f"{database}.{name}", "\n".join(row for (row,) in rows).encode()
    client = services.store.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=services.store.bucket):
        for item in page.get("Contents", []):
            body = client.get_object(Bucket=services.store.bucket, Key=item["Key"])["Body"].read()
            yield f"s3://{item['Key']}", body


def test_a_flow_leaves_no_secret_anywhere_though_a_stage_prints_its_environment(
    installation: Installation, services: Services
) -> None:
    project = installation.project
    project.server |= {**PLANTED, **HOOKS, "MLFLOW_TRACKING_USERNAME": "trainer"}
    for knob in ("print_train", "print_evaluate", "fail_evaluate"):
        turn_knob(project, knob)
    failed = project.run("flows", "run", "--debug")
    assert failed.returncode == 1
    release_knobs(project)
    said = installation.deploy("--automations")
    worker = installation.worker()
    worker.start()
    try:
        run = installation.ended_run(installation.start_run())
    finally:
        worker.stop()
    assert run["state"]["name"] == "Promoted", run["state"]

    shown = {"deploy": said, "run": failed.stdout + failed.stderr, "worker": worker.log.read_text(encoding="utf-8")}
    places = [*((name, text.encode()) for name, text in shown.items()), *written(installation, services)]
    assert any(b"printed by evaluate: HOME=" in text for _, text in places)  # it does reach the log
    secrets = {
        **PLANTED,
        "AWS_SECRET_ACCESS_KEY": services.store.secret,
        "login of Prefect": services.prefect.password,
        "password of Prefect": services.prefect.password.partition(":")[2],
        "login of MLflow": f"trainer:{PLANTED['MLFLOW_TRACKING_PASSWORD']}",
        **{word: f"planted-{word}-0123456789" for word in ("notify", "reload", "query")},
    }
    sought = [(name, form) for name, secret in secrets.items() for form in forms(secret)]
    found = [(name, place) for name, form in sought for place, text in places if form in text]
    assert found == []
    assert len(places) > 100
