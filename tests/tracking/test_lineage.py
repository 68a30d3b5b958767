"""Lineage says where a model came from: the tags of a version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tasks.core.provenance import Origin
from tasks.tracking.lineage import MAX_TAG_LENGTH, differing_fields, lineage_tags, stage_lock_hash, stage_params

RESULT = {"success_rate": 0.95, "ci_low": 0.93, "ci_high": 0.97, "num_problems": 500, "samples_per_problem": 2}
CARD = {"environment": "travel_desk", "fingerprint": "f00d", "hashes": {"test.jsonl": "aa", "train.jsonl": "bb"}}
EVALUATION = {
    "best_snapshot": "iteration-0080",
    "select": {"iteration-0080": {"success_rate": 0.94}},
    "test": {"best": RESULT},
    "environment": {"fingerprint": "beef", "pin": "abc", "drift": []},
}
TOOLS = {"look": {"version": "1"}, "book": {"version": "1"}}
DESCRIPTION = {"data": "d1", "tools": TOOLS}


RECORD = {
    "git_commit": "c0de", "git_dirty": "false", "python": "3.11.9", "platform": "Linux x86_64", "cpu": "a processor",
    "num_threads": 2, "device": "a card", "packages": {"torch": "2.13.0"},
}  # fmt: skip
EVALUATED = {**RECORD, "git_commit": "d1ff", "git_dirty": "true"}


def tags_of(**changed: Any) -> dict[str, str]:
    params = changed.pop("params", {"seed": 7})
    origin = Origin(params, "seed: 7\n", None, "f11e", {"train": RECORD, "evaluate": EVALUATED})
    values = {
        "card": CARD, "evaluation": EVALUATION, "weights": "c0ffee", "description": DESCRIPTION, "drift": [],
        "reason": "new problems",
    }  # fmt: skip
    return lineage_tags(origin, **{**values, **changed})


def test_every_tag_is_text_and_names_data_world_settings_and_results():
    tags = tags_of()
    assert all(isinstance(value, str) for value in tags.values())
    expected = {
        "reason": "new problems",
        "weights_hash": "c0ffee",
        "snapshot": "iteration-0080",
        "seed": "7",
        "environment_fingerprint": "f00d",
        "environment_fingerprint_at_evaluation": "beef",
        "environment_drift": "none",
        "data_hash.test.jsonl": "aa",
        "test.success_rate": "0.95",
        "select.success_rate": "0.94",
        "git_commit": "c0de",
        "git_dirty": "false",
        "evaluation.git_commit": "d1ff",
        "evaluation.git_dirty": "true",
        "dvc_lock_hash": "f11e",
        "num_threads": "2",
        "device": "a card",
        "trainers": "1, local",
    }
    assert expected.items() <= tags.items()
    assert {"params_hash", "packages_hash"} <= tags.keys()


def test_other_params_have_another_hash():
    hashes = {tags_of(params={"seed": seed})["params_hash"] for seed in (7, 8)}
    assert len(hashes) == 2


def test_an_accepted_drift_is_told_and_cut_to_what_a_tag_may_hold():
    drift = ["train: tools.look.version: 1 → 2", "train: data: d1 → d2"]
    assert tags_of(drift=drift)["environment_drift"] == "; ".join(drift)
    assert len(tags_of(drift=["x" * 9000])["environment_drift"]) == MAX_TAG_LENGTH + 1


def test_another_version_of_one_tool_is_the_one_field_that_differs():
    tags = tags_of()
    tools = {**TOOLS, "book": {"version": "2"}}
    assert differing_fields(tags, DESCRIPTION) == []
    assert differing_fields(tags, {**DESCRIPTION, "tools": tools}) == ["tools.book"]
    assert differing_fields(tags, {"data": "d2", "tools": {"look": {"version": "1"}}}) == ["data", "tools.book"]
    assert differing_fields({}, DESCRIPTION) == []  # a version from before there was such a tag


def test_more_tools_than_a_tag_can_name_have_one_hash_together():
    many = {"data": "d1", "tools": {f"tool_{number}": {"version": "1"} for number in range(400)}}
    tags = tags_of(description=many)
    assert len(tags["environment_fields"]) < 100
    assert differing_fields(tags, {**many, "tools": {"tool_1": {}}}) == ["tools"]


def test_a_stage_is_known_by_its_entry_in_dvc_lock(tmp_path: Path):
    lock = tmp_path / "dvc.lock"
    entry = {"cmd": "x", "params": {"params.yaml": {"train": {"updates_per_batch": 2}}}}
    lock.write_text(yaml.safe_dump({"schema": "2.0", "stages": {"train": entry}}), encoding="utf-8")
    assert stage_params("train", lock) == {"train.updates_per_batch": 2}
    before = stage_lock_hash("train", lock)
    lock.write_text(yaml.safe_dump({"schema": "2.0", "stages": {"train": {**entry, "cmd": "y"}}}), encoding="utf-8")
    assert stage_lock_hash("train", lock) not in ("", before)
    assert stage_lock_hash("evaluate", lock) == ""
    assert stage_lock_hash("train", tmp_path / "missing.lock") == ""
