"""drift-check and evaluate-snapshot on a real champion, after a whole flow."""

from __future__ import annotations

import pytest

from tasks.core.files import content_hash, read_json, read_jsonl
from tests.pipeline.project import Project

pytestmark = pytest.mark.flow


def problems_of(project: Project, file: str) -> set[str]:
    return {row["problem_id"] for _, row in read_jsonl(project.artifacts / file)}


def test_a_champion_is_checked_and_played_on_select_alone_and_nothing_else_changes(finished: Project):
    select = {row["id"] for _, row in read_jsonl(finished.artifacts / "curate" / "select.jsonl")}
    before = content_hash(finished.artifacts / "evaluate"), finished.versions()
    done = finished.run("tasks", "drift-check")
    assert done.returncode == 0, done.stderr
    assert "the environment is as curated; version 1 shows no fall" in done.stdout
    assert problems_of(finished, "drift_check/select_champion.jsonl") <= select

    champion = "models:/travel-desk-agent@champion"
    done = finished.run("tasks", "evaluate-snapshot", champion)
    assert done.returncode == 0, done.stderr
    row = read_json(finished.artifacts / "evaluate_snapshot" / "result.json")
    best = finished.evaluation()["best_snapshot"]
    assert row["success_rate"] == finished.evaluation()["select"][best]["success_rate"]  # the same random numbers
    assert problems_of(finished, f"evaluate_snapshot/select_{row['name']}.jsonl") == select
    assert (content_hash(finished.artifacts / "evaluate"), finished.versions()) == before


def test_what_is_no_model_is_refused_with_the_snapshots_there_are(finished: Project):
    done = finished.run("tasks", "evaluate-snapshot", "iteration-9999")
    assert done.returncode == 1
    assert "models:/" in done.stderr
    assert finished.evaluation()["best_snapshot"] in done.stderr
