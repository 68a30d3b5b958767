"""What the tests of a smoke profile share: its finished flow, and what that left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.files import read_json
from tests.pipeline.project import Project, make_project


def run_smoke(
    folder: Path, profile: str, *, databases: Path, prefect: dict[str, str], changed: Mapping[str, Any] | None = None
) -> Project:
    """A flow on the profile, to its end; `changed` are other params."""
    project = make_project(folder / "project", profile=profile).lay(databases)
    project.server = prefect
    if changed:
        project.set_params(changed)
    project.flow()
    return project


def rows(project: Project, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.artifacts / name).read_text(encoding="utf-8").splitlines()]


def check_verdicts(project: Project, checks: set[str]) -> None:
    """Every episode of `assess`, and of every policy on test, was judged by these checks, and none was lost."""
    folder = project.artifacts / "evaluate"
    of_test = [str(path.relative_to(project.artifacts)) for path in sorted(folder.rglob("test_*.jsonl"))]
    for row in (row for file in ("assess/trajectories.jsonl", *of_test) for row in rows(project, file)):
        assert row["outcome"] in {"success", "failure", "max_turns", "overlong"}
        assert row["checks"].keys() == checks


def check_doctor(project: Project) -> None:
    results = {item["check"]: item["result"] for item in read_json(project.artifacts / "doctor.json")["results"]}
    assert "fail" not in results.values()
    assert results["references score 1"] == "pass"
