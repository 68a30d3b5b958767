"""What a version says it was made with is what its training and its evaluation ran with, whenever it is promoted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import read_json, write_json
from tasks.core.provenance import RECORDED, provenance_file
from tasks.stages.promote.approvals import approve
from tasks.stages.promote.overrides import ManualOverride
from tasks.tracking.connection import experiment_id
from tasks.tracking.finished_runs import write_reasons
from tasks.tracking.metrics import RUN_ID_VARIABLE
from tasks.tracking.registry import Registry
from tasks.tracking.versions import Version
from tests.stages.promote.test_promote import FORCE, Pipeline, pipeline
from tests.tracking.project import SETTINGS

__all__ = ["pipeline"]
pytestmark = pytest.mark.slow


def read_lineage(name: str) -> tuple[Version, Any]:
    """A file of the champion's lineage, parsed."""
    registry = Registry(SETTINGS, "travel-desk-agent")
    champion = registry.champion()
    assert champion is not None
    content = registry.read_lineage(champion, name, Path.read_bytes)
    assert content is not None
    return champion, yaml.safe_load(content)


def edit_temperature(pipeline: Pipeline) -> None:
    """A setting of the training, after it."""
    pipeline.params["sampling"]["temperature"] = 0.5


@pytest.mark.parametrize("override", [None, FORCE])
def test_a_setting_edited_after_training_is_not_recorded_as_trained_with(pipeline: Pipeline, override: Any):
    pipeline.evaluate(0.9)
    edit_temperature(pipeline)
    with pytest.raises(ValueError, match=r"sampling\.temperature = 1\.0, and params\.yaml has 0\.5.*`dvc repro`"):
        pipeline.promote(override)
    assert pipeline.num_versions() == 0


def test_an_approval_after_an_edit_keeps_the_lineage_that_waited(pipeline: Pipeline, tmp_path: Path):
    pipeline.params["promote"]["approval"] = True
    pipeline.evaluate(0.9)
    pipeline.promote()
    waiting = Registry(SETTINGS, "travel-desk-agent").at("challenger")
    assert waiting is not None
    edit_temperature(pipeline)
    Path("params.yaml").write_text(yaml.safe_dump(pipeline.params), encoding="utf-8")
    assert "became champion" in approve(ManualOverride("approve", "looked at ten episodes"))[0]
    champion, params = read_lineage("params.yaml")
    assert params["sampling"]["temperature"] == 1.0
    lineage = ("lineage_files", "params_hash", "git_commit", "dvc_lock_hash")
    assert {name: champion.tags[name] for name in lineage} == {name: waiting.tags[name] for name in lineage}


def test_a_challenger_that_waits_another_night_has_one_lineage(pipeline: Pipeline):
    pipeline.params["promote"]["approval"] = True
    pipeline.evaluate(0.9)
    files = []
    for _ in range(2):
        pipeline.promote()
        waiting = Registry(SETTINGS, "travel-desk-agent").at("challenger")
        assert waiting is not None
        files.append(waiting.lineage_files)
    assert files[0] == files[1] and "lineage/params.yaml" in files[0]


def test_the_commits_are_those_of_the_training_and_of_the_evaluation(pipeline: Pipeline, tmp_path: Path):
    pipeline.evaluate(0.9)
    for stage, commit in (("train", "a" * 40), ("evaluate", "b" * 40)):
        file = provenance_file(stage, pipeline.paths)
        write_json(file, {**read_json(file), "git_commit": commit, "git_dirty": "false"})
    pipeline.promote()
    champion, records = read_lineage("provenance.json")
    assert (champion.tags["git_commit"], champion.tags["evaluation.git_commit"]) == ("a" * 40, "b" * 40)
    assert champion.tags["git_dirty"] == "false"
    assert records["train"] == read_json(provenance_file("train", pipeline.paths))
    assert list(records) == sorted(RECORDED)


def test_the_policy_may_be_edited_and_the_next_promotion_goes_by_it(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    pipeline.params["promote"]["minimum_success"] = 0.95
    assert pipeline.promote()["decision"] == "reject"
    pipeline.params["promote"]["minimum_success"] = 0.6
    assert pipeline.promote()["decision"] == "promote"


def test_a_version_is_not_made_of_results_that_nobody_knows_the_settings_of(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    provenance_file("train", pipeline.paths).unlink()
    with pytest.raises(ValueError, match=r"provenance/train\.json: does not exist.*`dvc repro`"):
        pipeline.promote()


@pytest.mark.parametrize("is_of_a_flow", [True, False])
def test_the_reason_of_a_run_that_died_is_not_that_of_a_promotion_by_hand(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, is_of_a_flow: bool
):
    pipeline.evaluate(0.9)
    write_reasons(pipeline.paths, [{"kind": "recipe", "text": "the recipe changed: seed 0 → 1"}])
    if is_of_a_flow:
        registry = Registry(SETTINGS, "travel-desk-agent")
        run = registry.client.create_run(experiment_id(registry.client, SETTINGS))
        monkeypatch.setenv(RUN_ID_VARIABLE, run.info.run_id)
    pipeline.promote()
    champion = Registry(SETTINGS, "travel-desk-agent").champion()
    expected = "the recipe changed: seed 0 → 1" if is_of_a_flow else "none: promoted by hand, without a flow"
    assert champion is not None and champion.tags["reason"] == expected
