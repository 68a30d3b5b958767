"""One key for both sides, and what was measured is what is promoted; with the project of `test_promote.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tasks.core.files import read_json, write_json
from tasks.models.folders import save_adapter
from tasks.stages.evaluate.identity import hash_episodes
from tasks.stages.evaluate.measurement_key import key_of
from tasks.tracking.registry import Registry
from tests.stages.promote.test_promote import FORCE, Pipeline, pipeline, write_model
from tests.tracking.project import SETTINGS

__all__ = ["pipeline"]
pytestmark = pytest.mark.slow
MODEL = "travel-desk-agent"


def evaluation_file(pipeline: Pipeline) -> Path:
    return pipeline.paths.stage("evaluate") / "evaluation.json"


def on_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tasks.stages.evaluate.measurement_key.package_versions", lambda: {"torch": "9.9", "jinja2": "1"}
    )


@pytest.mark.parametrize("change", ["packages", "device", "code"])
def test_a_challenger_evaluated_under_another_key_is_measured_again_and_so_is_its_rival(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
):
    """Twice, and nothing is played the second time."""
    pipeline.evaluate(0.9, warm_start=0.5)
    if change == "packages":
        on_another_torch(monkeypatch)
    elif change == "device":
        monkeypatch.setattr("tasks.rollouts.settings.OwnEngineSettings.device", lambda own, compute: "another")
    else:
        monkeypatch.setattr(
            "tasks.stages.evaluate.measurement_key.code_of_episodes", lambda *_: {Path("tasks/core/records.py")}
        )
    pipeline.params["promote"]["minimum_success"] = 0.95  # no champion yet
    for _ in range(2):
        decision = pipeline.promote()
        measurement = decision["measurement"]
        why = {"packages": "packages.torch", "device": "device", "code": "code.tasks/models/folders.py"}
        for side in ("challenger", "other"):
            row = measurement[side]
            assert why[change] in row["measured_again_for"]
            assert row["key"] == key_of(measurement["parts"], row["model"])
    assert [item["label"] for item in pipeline.measured] == ["iteration-0010 on test", "the warm start on test"]
    told = capsys.readouterr().out
    assert told.count("iteration-0010 is measured again on test") == 1
    assert any(reason.startswith("Measured again: iteration-0010") for reason in decision["reasons"])


def test_what_a_challenger_measured_again_did_is_what_decides_and_what_its_version_keeps(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    """On record it solves 90%; today's torch has it solve 50%, and the warm start 40%."""
    pipeline.evaluate(0.9)
    on_another_torch(monkeypatch)
    monkeypatch.setattr(
        "tasks.rollouts.collect.sample_episodes",
        lambda folder, *args, **named: Pipeline.sample_episodes(pipeline, _half(folder), *args, **named),
    )
    decision = pipeline.promote()
    assert (decision["decision"], decision["test"]["best"]["success_rate"]) == ("reject", 0.5)
    decision = pipeline.promote(FORCE)
    lineage = decision["champion_after"]["lineage"]
    assert lineage["test.success_rate"] == "0.5"
    shutil.rmtree(pipeline.paths.stage("promote") / "episodes")
    pipeline.evaluate(0.6)  # on today's torch, and the champion's kept episodes are of it too
    num_measured = len(pipeline.measured)
    assert pipeline.promote()["comparison"]["other"]["success_rate"] == 0.5
    assert len(pipeline.measured) == num_measured


def test_once_evaluate_ran_under_todays_key_nothing_was_measured_again(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    """What was measured for the promotion before gives way to what evaluate left since, and nothing is played."""
    pipeline.params["promote"]["minimum_success"] = 0.95
    pipeline.evaluate(0.9)
    on_another_torch(monkeypatch)
    assert any("Measured again" in reason for reason in pipeline.promote()["reasons"])
    num_measured = len(pipeline.measured)

    pipeline.evaluate(0.9)
    decision = pipeline.promote()
    assert len(pipeline.measured) == num_measured
    assert [decision["measurement"][side]["measured_again_for"] for side in ("challenger", "other")] == [[], []]
    assert not any("Measured again" in reason for reason in decision["reasons"])


def _half(folder: Path) -> Path:
    half = Path("half") / folder.name
    share = float((folder / "model.safetensors").read_text())
    write_model(half, 0.5 if share == 0.9 else share)
    return half


@pytest.mark.parametrize("policy", ["best", "warm_start"])
@pytest.mark.parametrize("field", ["sampled_mask", "token_ids"])
def test_an_edited_token_count_is_refused_whoever_asks(pipeline: Pipeline, policy: str, field: str):
    """Success stays what it was, so nothing but the hash of the file can tell."""
    pipeline.evaluate(0.9)
    file = evaluation_file(pipeline).parent / "trajectories" / f"test_{policy}.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows[3]["sequences"][0][field] = rows[3]["sequences"][0][field][:1]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"(is not the file that|artifacts/evaluate is not what).* (evaluate|it) left.*dvc repro"
    ):
        pipeline.promote()
    assert pipeline.champion() is None


def test_episodes_altered_in_artifacts_promote_do_not_count_and_that_is_told(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pipeline.evaluate(0.55)
    on_another_torch(monkeypatch)
    pipeline.promote()
    assert len(pipeline.measured) == 2
    for file in (pipeline.paths.stage("promote") / "episodes").glob("*.jsonl"):
        file.write_text(file.read_text(encoding="utf-8").replace("failure", "success"), encoding="utf-8")
    decision = pipeline.promote()
    assert (decision["decision"], len(pipeline.measured)) == ("reject", 4)
    assert capsys.readouterr().err.count("was altered since it was measured") == 2


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "tokenizer.json", "extra/added.json"])
def test_a_file_altered_or_added_after_evaluation_is_refused_though_the_weights_are_the_same(
    pipeline: Pipeline, name: str
):
    """config.json with another rms_norm_eps was promoted when weights alone were hashed."""
    pipeline.evaluate(0.9)
    folder = pipeline.paths.stage("train") / "snapshots" / "iteration-0010"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text('{"rms_norm_eps": 0.1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"iteration-0010: its files .* are not the ones evaluate measured.*dvc repro"):
        pipeline.promote(FORCE)
    assert pipeline.champion() is None


def test_a_file_altered_while_the_decision_was_made_is_not_registered(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
):
    pipeline.evaluate(0.9)
    config = pipeline.paths.stage("train") / "snapshots" / "iteration-0010" / "config.json"

    def edited(*args: object) -> None:
        config.write_text('{"rms_norm_eps": 0.1}', encoding="utf-8")

    with monkeypatch.context() as patch:
        patch.setattr("tasks.tracking.history.first_promotion_note", edited)
        with pytest.raises(ValueError, match=r"its files changed since they were measured.*Nothing was registered"):
            pipeline.promote()
    assert pipeline.num_versions() == 0
    config.write_text("{}", encoding="utf-8")
    assert pipeline.promote()["decision"] == "promote"


def test_an_adapter_is_refused_where_the_model_it_belongs_to_was_altered(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    base = pipeline.paths.start_model
    snapshot = pipeline.paths.stage("train") / "snapshots" / "iteration-0010"

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}", encoding="utf-8")

    def save(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"0.9")

    save_adapter(snapshot, save, Tokenizer(), base=base)
    (base / "config.json").write_text('{"rms_norm_eps": 0.1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"warm_start/model: its files .* changed since"):
        pipeline.promote(FORCE)


def test_the_same_weights_with_another_configuration_are_another_model_and_another_version(pipeline: Pipeline):
    pipeline.evaluate(0.7)
    pipeline.promote()

    def configure(snapshot: Path) -> None:
        (snapshot / "config.json").write_text('{"rms_norm_eps": 0.1}', encoding="utf-8")

    pipeline.evaluate(0.7, complete=configure)
    decision = pipeline.promote()  # it is measured like any other challenger, and is no better
    assert (decision["decision"], decision["is_champion"]) == ("hold", False)
    assert decision["checks"]
    decision = pipeline.promote(FORCE)
    before, after = decision["champion_before"], decision["champion_after"]
    assert (before["version"], after["version"]) == (1, 2)
    assert before["weights"] == after["weights"]
    registry = Registry(SETTINGS, MODEL)
    assert [version.version for version in registry.with_weights(after["weights"])] == [1, 2]
    pipeline.promote()
    outcome = read_json(pipeline.paths.stage("promote") / "outcome.json")
    assert (outcome["decision"], outcome["champion"]) == ("hold", 2)


def test_an_evaluation_from_before_there_were_keys_is_to_be_made_again(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    evaluation = read_json(evaluation_file(pipeline))
    del evaluation["measurement"]
    write_json(evaluation_file(pipeline), evaluation)
    with pytest.raises(ValueError, match=r"does not say what it was measured under.*dvc repro evaluate"):
        pipeline.promote(FORCE)


def test_evaluate_writes_the_hash_of_every_file_of_episodes(pipeline: Pipeline):
    pipeline.evaluate(0.9)
    evaluation = read_json(evaluation_file(pipeline))
    assert evaluation["contents"] == hash_episodes(evaluation_file(pipeline).parent / "trajectories")
    assert set(evaluation["contents"]) == {"test_base.jsonl", "test_best.jsonl", "test_warm_start.jsonl"}
