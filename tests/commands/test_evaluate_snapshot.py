"""`evaluate-snapshot` takes every form in which a model lies in a folder, and loses nothing to a kill."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import yaml

from tasks.commands.evaluate_snapshot import evaluate_snapshot, find_folder, table_of
from tasks.commands.serve.versions import open_source
from tasks.core.files import write_text
from tasks.core.resume import resume_root
from tasks.core.settings import Paths, read_params
from tasks.measurement.statistics import summarise
from tasks.models.folders import folder_hash, save_adapter, write_pointer
from tests import tiny
from tests.measurement.synthetic import trajectory
from tests.stages.evaluate.stage_folder import Kill, small_params, stage_folder


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        write_text(folder / "tokenizer.json", "{}")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """A warm start that was not needed, and two snapshots: an adapter over its model, and one of a skipped training."""
    paths = Paths(tmp_path / "artifacts")
    model, snapshots = tmp_path / "base", paths.stage("train") / "snapshots"
    for name in ("config.json", "model.safetensors"):
        write_text(model / name, "{}")
    write_pointer(paths.start_model, str(model))
    write_pointer(snapshots / "iteration-0000", str(paths.start_model))
    save_adapter(
        snapshots / "iteration-0040",
        lambda folder: write_text(folder / "adapter_model.safetensors", "adapter"),
        Tokenizer(),
        base=model,
    )
    return paths


def test_a_whole_model_an_adapter_and_a_pointer_are_models(paths: Paths, tmp_path: Path):
    snapshots, pointer = paths.stage("train") / "snapshots", paths.start_model
    assert find_folder("iteration-0040", paths) == snapshots / "iteration-0040"
    assert find_folder("iteration-0000", paths) == snapshots / "iteration-0000"
    for folder in (tmp_path / "base", pointer):
        assert find_folder(str(folder), paths) == folder
    for folder in (snapshots / "iteration-0040", pointer):
        assert open_source(str(folder), tmp_path, None).name == folder.name


def test_a_folder_without_a_model_is_refused_with_the_snapshots_there_are(paths: Paths):
    with pytest.raises(ValueError, match=r"is no model.*iteration-0000, iteration-0040"):
        find_folder(str(paths.stage("train")), paths)


def test_a_category_called_as_the_model_is_a_row_of_its_own():
    result = summarise(
        [trajectory("p0", True, category="desk"), trajectory("p1", False, category="sea")], confidence=0.95
    )
    table = table_of({"name": "desk", "confidence": 0.95, **result})
    assert [list(column.cells) for column in table.columns[:2]] == [
        ["desk", "desk", "sea"],
        ["50.0%", "100.0%", "0.0%"],
    ]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Curated problems and a snapshot, with nothing logged anywhere."""
    monkeypatch.chdir(tmp_path)
    params = small_params(select_samples_per_problem=2)
    params["engine"] |= {"max_concurrent_episodes": 1}
    write_text(Path("params.yaml"), yaml.safe_dump(params))
    monkeypatch.setattr("tasks.tracking.connection.refuse_lost_registry", lambda settings: None)
    monkeypatch.setattr("tasks.tracking.measurements.log_measurement", lambda *_, **__: "run 1")
    stage_folder(tmp_path)
    return Paths("artifacts")


@pytest.mark.slow
def test_a_killed_command_goes_on_from_the_episodes_that_ended(project: Paths, monkeypatch: pytest.MonkeyPatch):
    """Two problems of select, two episodes each: after three there is one left. Another seed plays all four."""
    kill = Kill(monkeypatch)
    kill.at = 3
    with pytest.raises(KeyboardInterrupt):
        evaluate_snapshot("iteration-0001")
    row = evaluate_snapshot("iteration-0001")
    assert (kill.num_ended, row["num_problems"], row["samples_per_problem"]) == (4, 2, 2)
    assert not resume_root("evaluate_snapshot", project).exists()

    kill.at = 4 + 3
    with pytest.raises(KeyboardInterrupt):
        evaluate_snapshot("iteration-0001")
    write_text(Path("params.yaml"), yaml.safe_dump({**read_params(), "seed": 12}))
    evaluate_snapshot("iteration-0001")
    assert kill.num_ended == 4 + 3 + 4


@pytest.mark.slow
def test_the_folder_is_its_own_until_all_is_written(project: Paths, monkeypatch: pytest.MonkeyPatch):
    """The next one keeps its ended episodes in the same place, which the end of this one clears."""

    def log(*_: object, **__: object) -> str:
        with (project.artifacts / ".flow.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "run 1"

    monkeypatch.setattr("tasks.tracking.measurements.log_measurement", log)
    assert evaluate_snapshot("iteration-0001")["mlflow_run_id"] == "run 1"


@pytest.mark.slow
def test_two_models_in_folders_of_one_name_keep_their_episodes(project: Paths, capsys: pytest.CaptureFixture[str]):
    models = [tiny.model_folder(Path(place) / "model", seed=seed) for seed, place in enumerate("ab")]
    names = [f"model-{folder_hash(model)[:8]}" for model in models]
    files = [project.artifacts / "evaluate_snapshot" / f"select_{name}.jsonl" for name in names]
    assert [evaluate_snapshot(str(model))["name"] for model in models] == names
    first = files[0].read_bytes()
    assert first != files[1].read_bytes()
    told = capsys.readouterr().out
    assert all(str(file) in told for file in files)
    evaluate_snapshot(str(models[0]))
    assert files[0].read_bytes() == first
