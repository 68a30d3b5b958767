"""A real stage with its problems on S3 and `paths.remote`, run as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.core.files import content_hash
from tasks.core.urls import parse_url
from tasks.storage.client import connect
from tasks.storage.folders import get_folder
from tests import tiny
from tests.conftest import ROOT
from tests.profiles import profile_params
from tests.storage.places import SETTINGS, Place

pytestmark = pytest.mark.slow


def run_curate(workspace: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tasks", "curate"]
    return subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, check=False)


def test_curate_reads_its_problems_from_s3_and_leaves_its_results_there(place: Place, tmp_path: Path):
    workspace = Path.cwd()
    rows = [json.dumps(problem.model_dump(mode="json")) for problem in tiny.problems(120)]
    place.put("problems.jsonl", "\n".join(rows).encode())
    params = profile_params("test")
    params["curate"]["source"] = place.url("problems.jsonl")
    params["paths"]["remote"] = place.url("agent")
    (workspace / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    (workspace / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    (workspace / "tasks").symlink_to(ROOT / "tasks")

    done = run_curate(workspace)
    assert done.returncode == 0, done.stderr
    results = parse_url(place.url("agent/results"))
    get_folder(connect(SETTINGS), results / "curate", tmp_path / "read")
    assert content_hash(tmp_path / "read") == content_hash(workspace / "artifacts" / "curate")
    get_folder(connect(SETTINGS), results / "run", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "provenance" / "curate.json").read_text())
    assert record["data"][place.url("problems.jsonl")] != "none"

    place.remove("problems.jsonl")
    done = run_curate(workspace)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert place.url("problems.jsonl") in done.stderr
