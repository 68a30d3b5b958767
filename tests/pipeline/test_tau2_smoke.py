"""The flow on τ²-bench's real prompts, from the package's rows to a decision: all connects, and nothing is learnt.

The model is tiny and untrained. What is looked at is that each stage did its work at prompts of 9,500 tokens: curation
with the official problems, demonstrations that look before they act, rollouts with the package's worlds, verdicts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.files import read_json
from tests.pipeline.project import Project
from tests.pipeline.smoke import check_doctor, check_verdicts, rows, run_smoke

pytestmark = pytest.mark.flow


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, databases: Path, prefect: dict[str, str]) -> Project:
    """A finished flow on the smoke profile; every test below looks at this one run."""
    folder = tmp_path_factory.mktemp("tau2")
    return run_smoke(folder, "tau2_smoke", databases=databases, prefect=prefect)


def test_the_rows_are_curated_and_no_set_of_faults_is_on_two_sides(smoke: Project) -> None:
    card = read_json(smoke.artifacts / "curate" / "card.json")
    assert card["shared_split_groups"]["num_shared"] == 0
    assert all(item["success"] for item in card["expectations"])
    assert sum(card["num_problems"].values()) + sum(item["num_problems"] for item in card["left_out"]) == 114


def test_prompts_have_the_rules_and_the_tools(smoke: Project) -> None:
    prompts = [row["sequences"][0]["sampled_mask"].index(True) for row in rows(smoke, "assess/trajectories.jsonl")]
    assert len(prompts) == 2
    assert all(8_000 < length < 11_000 for length in prompts)


def test_an_iteration_changes_the_weights(smoke: Project) -> None:
    (metrics,) = rows(smoke, "train/metrics.jsonl")
    assert (metrics["num_episodes"], metrics["optimizer_steps"]) == (8, 1)
    assert metrics["grad_norm"] > 0 and not metrics["non_finite"]


def test_the_doctor_found_no_failure_and_references_score_1(smoke: Project) -> None:
    check_doctor(smoke)


def test_every_episode_was_judged_and_none_was_lost(smoke: Project) -> None:
    check_verdicts(smoke, {"done", "assertions", "actions"})


def test_the_expert_solves_every_test_problem_and_done_alone_none(smoke: Project) -> None:
    baselines = smoke.evaluation()["baselines"]
    assert baselines["expert"]["success_rate"] == 1.0
    assert baselines["done_alone"]["success_rate"] == 0.0


def test_a_model_that_learnt_nothing_is_not_promoted(smoke: Project) -> None:
    decision = smoke.decision()
    assert decision["decision"] in ("hold", "reject") and decision["champion_after"] is None
    assert smoke.versions() == []
    assert (smoke.artifacts / "report" / "index.html").exists()
