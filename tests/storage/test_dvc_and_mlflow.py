"""DVC's remote, DVC's deps and MLflow's artifacts on a real S3 server, by the environment's variables alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.places import Place

pytestmark = pytest.mark.slow
GRAPH = """
stages:
  copy:
    cmd: date +%N > made.txt
    deps: ["{file}", "{folder}"]
    outs: [made.txt]
"""


def dvc(project: Path, *arguments: str) -> str:
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(project / "site-cache")}
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stage_runs_again_when_an_object_it_depends_on_changed_and_its_result_reaches_another_machine(
    place: Place, tmp_path: Path
):
    place.put("problems.jsonl", b"1\n")
    place.put("model/config.json", b"{}")
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    dvc(one, "init", "-q", "--no-scm")
    graph = GRAPH.format(file=place.url("problems.jsonl"), folder=place.url("model"))
    (one / "dvc.yaml").write_text(graph, encoding="utf-8")
    dvc(one, "repro", "-q")
    first = (one / "made.txt").read_text()
    dvc(one, "repro", "-q")
    assert (one / "made.txt").read_text() == first
    place.put("model/config.json", b"{ }")
    dvc(one, "repro", "-q")
    assert (one / "made.txt").read_text() != first

    dvc(one, "remote", "add", "-q", "-d", "store", place.url("dvc"))
    dvc(one, "push", "-q")
    other.mkdir()
    dvc(other, "init", "-q", "--no-scm")
    for name in ("dvc.yaml", "dvc.lock", ".dvc/config"):
        (other / name).write_bytes((one / name).read_bytes())
    dvc(other, "pull", "-q")
    assert (other / "made.txt").read_text() == (one / "made.txt").read_text()
    assert "up to date" in dvc(other, "status")


def test_mlflow_keeps_artifacts_on_s3(place: Place, tmp_path: Path):
    from mlflow import MlflowClient
    from mlflow.store.artifact.s3_artifact_repo import _cached_get_s3_client

    _cached_get_s3_client.cache_clear()  # it may be of another test's server
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.create_run(client.create_experiment("s3", artifact_location=place.url("mlflow")))
    (tmp_path / "page.html").write_text("<p>decided</p>")
    client.log_artifact(run.info.run_id, str(tmp_path / "page.html"))
    assert any(name.endswith("page.html") for name in place.names("mlflow"))
    found = client.download_artifacts(run.info.run_id, "page.html", str(tmp_path))
    assert Path(found).read_text() == "<p>decided</p>"
