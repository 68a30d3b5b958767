"""`curate` and `assess` on τ²-bench's retail with a scripted user: the policy and 15 tools in the prompt, its verdicts.

The model is tiny and untrained. What is looked at is that references are solved, that no customer is on two sides, and
that an episode opens with the policy and then with what the user says.
"""

from __future__ import annotations

import pytest

from tasks.core.files import read_json
from tasks.models.folders import load_tokenizer
from tests.pipeline.project import Project, make_project
from tests.pipeline.smoke import rows

pytestmark = pytest.mark.flow
RETAIL = {
    "environment.settings": {"domain": "retail", "problems": "base"},
    "environment.user": {"played_by": "script", "reveal": "at_once", "model": None},
}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_project(tmp_path_factory.mktemp("desk") / "project", profile="tau2_smoke")
    project.set_params(RETAIL)
    for stage in ("curate", "assess"):
        done = project.run("tasks", stage)
        assert done.returncode == 0, done.stdout + done.stderr
    return project


def test_references_are_solved_and_no_customer_is_on_two_sides(smoke: Project) -> None:
    card = read_json(smoke.artifacts / "curate" / "card.json")
    assert card["shared_split_groups"]["num_shared"] == 0
    assert all(item["success"] for item in card["expectations"])
    assert sum(card["num_problems"].values()) + sum(item["num_problems"] for item in card["left_out"]) == 114


def test_an_episode_opens_with_the_policy_and_then_the_user(smoke: Project) -> None:
    tokenizer = load_tokenizer(smoke.artifacts / "assess" / "base_model")
    played = rows(smoke, "assess/trajectories.jsonl")
    assert len(played) == 2
    for row in played:
        (tokens,) = row["sequences"]
        prompt = tokenizer.decode(tokens["token_ids"][: tokens["sampled_mask"].index(True)])
        policy, request = prompt.index("# Retail agent policy"), prompt.index(row["request"])
        assert policy < request and '"name": "exchange_delivered_order_items"' in prompt
        assert row["checks"].keys() == {"database", "communicated"}
