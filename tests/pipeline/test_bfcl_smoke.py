"""The flow on BFCL's real prompts, from the package's rows to a decision: everything connects, and nothing is learnt.

The model is tiny and untrained, so success is near 0 and the honest end is no champion. What is looked at is that each
stage did its work at prompts of thousands of tokens: curation, rollouts with real tools, packed training, verdicts.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from tasks.core.files import read_json
from tests.pipeline.project import Project
from tests.pipeline.smoke import check_doctor, check_verdicts, rows, run_smoke
from tests.readme import page_block

pytestmark = pytest.mark.flow


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, databases: Path, prefect: dict[str, str]) -> Project:
    """A finished flow on the smoke profile; every test below looks at this one run."""
    fewer = {"warm_start.num_steps": 4}  # of the profile's 40, which are most of its minute
    folder = tmp_path_factory.mktemp("bfcl")
    return run_smoke(folder, "bfcl_smoke", databases=databases, prefect=prefect, changed=fewer)


def test_the_readmes_recipe_is_this_run() -> None:
    lines = page_block("README.md", "sh", "bfcl_smoke").splitlines()
    commands = [line.partition("#")[0].strip() for line in lines]
    assert commands == ["python -m tasks profile bfcl_smoke", "python -m flows run"]


def test_all_200_rows_are_curated_and_the_card_is_there(smoke: Project) -> None:
    card = read_json(smoke.artifacts / "curate" / "card.json")
    left_out = sum(item["num_problems"] for item in card["left_out"])
    assert sum(card["num_problems"].values()) + left_out == 200
    assert card["shared_split_groups"]["num_shared"] == 0
    failed = [item["name"] for item in card["expectations"] if not item["success"]]
    assert failed == ["each answer of a demonstration has text"]  # the benchmark publishes none, and reads none
    page = (smoke.artifacts / "curate" / "card.html").read_text(encoding="utf-8")
    assert "multi_turn_base/TradingBot" in page.replace("<wbr>", "")  # where a narrow screen may break it


def test_prompts_have_the_real_tools_and_thousands_of_tokens(smoke: Project) -> None:
    prompts = [row["sequences"][0]["sampled_mask"].index(True) for row in rows(smoke, "assess/trajectories.jsonl")]
    assert len(prompts) == 4
    assert 2_000 < median(prompts) < 4_096  # about 15,800 characters, by the embedded tokenizer 2,800 tokens


def test_two_iterations_take_four_optimizer_steps_that_change_the_weights(smoke: Project) -> None:
    metrics = rows(smoke, "train/metrics.jsonl")
    assert [row["optimizer_steps"] for row in metrics] == [2, 4]
    assert [row["num_episodes"] for row in metrics] == [8, 8]
    assert all(row["grad_norm"] > 0 and not row["non_finite"] for row in metrics)
    assert len(set(smoke.snapshot_hashes().values())) == 2


def test_the_doctor_found_no_failure_and_references_score_1(smoke: Project) -> None:
    check_doctor(smoke)


def test_every_episode_was_judged_and_none_was_lost(smoke: Project) -> None:
    check_verdicts(smoke, {"answered", "state", "response"})


def test_the_ground_truth_solves_every_test_problem_and_silence_none(smoke: Project) -> None:
    baselines = smoke.evaluation()["baselines"]
    assert baselines["ground_truth"]["success_rate"] == 1.0
    assert baselines["empty"]["success_rate"] == 0.0


def test_a_model_that_learnt_nothing_is_not_promoted_and_the_reasons_say_so(smoke: Project) -> None:
    decision = smoke.decision()
    assert read_json(smoke.artifacts / "train" / "learnt.json")["is_trained"]  # parts of the reward differ, success not
    assert "untrained" not in read_json(smoke.artifacts / "summary.json")
    assert smoke.evaluation()["test"]["best"]["success_rate"] <= 0.5
    assert decision["decision"] in ("hold", "reject") and decision["champion_after"] is None
    assert decision["reasons"][-1] == "There is still no champion."
    assert smoke.versions() == []
    assert (smoke.artifacts / "report" / "index.html").exists()
