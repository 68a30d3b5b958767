"""Each file that a later start reads, damaged: one line that names the file, what is lost without it and the way back.

Databases are in `tracking/test_damaged_database.py`, kept episodes in `test_evaluate_resume.py`, checkpoints in
`learning/test_checkpoints.py`, model folders in `test_model_folders.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.dead_locks import release_dead_locks
from tasks.__main__ import app
from tasks.core.files import read_json, read_jsonl, read_yaml, write_json, write_jsonl
from tasks.core.kept_files import KEPT, kept_file
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.drift.pin import read_accepted
from tasks.measurement.learnt import skipped_row
from tests import tiny
from tests.conftest import ROOT
from tests.damage import DAMAGES, OF_JSON, damage
from tests.measurement.synthetic import write_artifacts

ARTIFACTS = Path("artifacts")
# What the report reads, and the command each line gives.
REPORTED = {
    "timings/evaluate.json": "rm artifacts/timings/evaluate.json && python -m tasks report",
    "timings/idle.json": "rm artifacts/timings/idle.json && python -m tasks report",
    "run.json": "rm artifacts/run.json && python -m tasks report",
    "promote/decision.json": "rm artifacts/promote/decision.json && python -m tasks promote",
    "assess/baseline.json": "dvc repro assess",
    "evaluate/evaluation.json": "dvc repro evaluate",
    "train/learnt.json": "dvc repro train",
}
LOCKED: dict[str, Any] = {
    "schema": "2.0",
    "stages": {
        "train": {
            "cmd": "echo 1 > made",
            "deps": [{"path": "given", "hash": "md5", "md5": "0" * 32, "size": 2}],
            "params": {"params.yaml": {"train": {"updates_per_batch": 2}}},
            "outs": [{"path": "made", "hash": "md5", "md5": "1" * 32, "size": 2}],
        }
    },
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A finished run in the working directory, with all that a report reads."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    paths = write_artifacts(ARTIFACTS, problems_per_type=2, num_snapshots=2)
    write_json(ARTIFACTS / "train" / "learnt.json", skipped_row())
    spent = {"best": {"seconds": 1.5, "episodes": 22}}
    write_json(ARTIFACTS / "timings" / "evaluate.json", {"select": {}, "test": spent, "evaluation": "0" * 64})
    idle = dict.fromkeys(("iteration_seconds", "trainer_idle_seconds", "engine_idle_seconds"), 1.0)
    write_json(ARTIFACTS / "timings" / "idle.json", {**idle, "metrics": "0" * 64})
    return paths


def refused(*arguments: str) -> str:
    """The one line on standard error of a command that ends with 1."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_JSON)
@pytest.mark.parametrize("name", REPORTED)
def test_a_damaged_file_stops_the_report_in_one_line_with_the_way_back(run: Paths, name: str, kind: str) -> None:
    damage(ARTIFACTS / name, kind)
    told = refused("report")
    assert told.startswith(f"error: artifacts/{name}: ") and "without it" in told
    assert f"`{REPORTED[name]}`" in told
    assert not (ARTIFACTS / "report").exists()


@pytest.mark.slow
def test_training_metrics_that_are_damaged_are_named_with_their_line(run: Paths) -> None:
    file = ARTIFACTS / "train" / "metrics.jsonl"
    first, second, *rest = file.read_bytes().splitlines(keepends=True)
    for bad in (second[:20] + b"\n", bytes(100) + b"\n", b'{"loss": 1}\n'):
        file.write_bytes(b"".join([first, bad, *rest]))
        told = refused("report")
        assert f"{file}, line 2: " in told
        assert "`dvc repro train`" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timings/evaluate.json"])
def test_the_command_a_line_gives_leads_to_a_report(run: Paths, name: str) -> None:
    damage(ARTIFACTS / name, "a page of zeros")
    command = refused("report").split("`")[1].replace("python", sys.executable, 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (ARTIFACTS / "report" / "index.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_JSON)
def test_a_damaged_record_of_accepted_drift_can_be_removed(run: Paths, kind: str) -> None:
    pin = {"fingerprint": "f", "description": {}, "probes": []}
    record = {"pinned": "a", "today": "b", "changes": ["x"], "stages": ["train"], "date": "d", "environment": pin}
    file = ARTIFACTS / "accepted_drift.json"
    write_json(file, [record])
    assert read_accepted(run) == [record]
    file.write_bytes(b"[{}]\n" if kind == "no object" else OF_JSON[kind](file.read_bytes()))
    with pytest.raises(ValueError, match=r"accepted_drift\.json.*without it.*`rm artifacts/accepted_drift\.json`") as e:
        read_accepted(run)
    subprocess.run(["bash", "-c", str(e.value).split("`")[1]], check=True)
    assert read_accepted(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_JSON)
@pytest.mark.parametrize("name", ["curate/environment.json", "curate/card.json", "assess/base_model/pointer.json"])
def test_what_a_stage_left_is_mended_by_dvc(run: Paths, name: str, kind: str) -> None:
    damage(write(ARTIFACTS / name), kind)
    with pytest.raises(ValueError) as error:
        read_json(ARTIFACTS / name)
    assert "\n" not in str(error.value) and name in str(error.value)
    assert f"`dvc repro {name.split('/')[0]}`" in str(error.value)


def write(file: Path) -> Path:
    write_json(file, {"some": list(range(2000))})
    return file


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in OF_JSON if kind != "empty"])
def test_curated_problems_that_are_damaged_are_named_with_their_line(run: Paths, kind: str) -> None:
    write_jsonl(run.split("train"), (problem.model_dump() for problem in tiny.problems(7)))
    damage(run.split("train"), kind)
    with pytest.raises(ValueError, match=r"train\.jsonl.*`dvc repro curate`") as error:
        read_split(run, "train")
    assert "\n" not in str(error.value)


def test_a_file_of_the_users_own_is_to_be_corrected_and_no_command_of_ours_is_given(run: Paths) -> None:
    """Also one with a name of ours, and one in a folder of results that params.yaml does not name."""
    names = ("train/mine.jsonl", "data/rows.jsonl", "run.json", "data/curate/train.jsonl", "old/train/metrics.jsonl")
    for name in (*names, "data/artifacts/promote/decision.json", "artifacts/mine/dvc.lock", "artifacts/mine/run.json"):
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("[1]\n")
        with pytest.raises(ValueError, match=r", line 1: .*Correct or remove it") as error:
            list(read_jsonl(file.absolute()))
        assert "`" not in str(error.value)
    assert kept_file(run.split("train").absolute()) is not None


def test_a_file_of_a_run_elsewhere_is_checked_and_no_command_of_ours_is_given(run: Paths) -> None:
    """`compare` reads the results of another run, and a command would change those of this one."""
    shutil.copytree(ARTIFACTS, "other/artifacts")
    damage(Path("other/artifacts/evaluate/evaluation.json"), "another shape")
    with pytest.raises(ValueError, match="not of the shape turnwise writes") as error:
        read_json(Path("other/artifacts/evaluate/evaluation.json"))
    assert "`" not in str(error.value)


def test_each_pattern_is_reached_and_gives_a_command() -> None:
    for kept in KEPT:
        path = (Path() if kept.pattern.startswith("dvc.") else ARTIFACTS) / kept.pattern.replace("*", "x")
        found = kept_file(path)
        assert found is not None and found.way_back(path).split()[0] in ("rm", "dvc", "git")
    assert len({kept.pattern for kept in KEPT}) == len(KEPT)


def test_an_ablations_run_is_removed_alone() -> None:
    for name in ("inputs.json", "train/metrics.jsonl", "train/snapshots/iteration-0002/base.json"):
        path = ARTIFACTS / "ablation" / "kl_0-7" / name
        kept = kept_file(path)
        assert kept is not None
        assert kept.way_back(path) == "rm -r artifacts/ablation/kl_0-7 && python -m tasks ablate"


def without(*keys: Any) -> Callable[[dict[str, Any]], Any]:
    """LOCKED with the last of the keys taken out."""

    def change(locked: dict[str, Any]) -> None:
        for key in keys[:-1]:
            locked = locked[key]
        del locked[keys[-1]]

    return change


def with_value(value: Any, *keys: Any) -> Callable[[dict[str, Any]], Any]:
    def change(locked: dict[str, Any]) -> None:
        for key in keys[:-1]:
            locked = locked[key]
        locked[keys[-1]] = value

    return change


OUT = ("stages", "train", "outs", 0)
ALTERED = {
    "nothing": lambda locked: None,
    "no schema": without("schema"),
    "another schema": with_value("3.0", "schema"),
    "no command": without("stages", "train", "cmd"),
    "a command of null": with_value(None, "stages", "train", "cmd"),
    "a size in words": with_value("big", *OUT, "size"),
    "a hash that is a number": with_value(12, *OUT, "md5"),
    "an output without a path": without(*OUT, "path"),
    "outputs of null": with_value(None, "stages", "train", "outs"),
    "a stage of null": with_value(None, "stages", "train"),
    "stages of null": with_value(None, "stages"),
    "a key nobody knows": with_value(1, "other"),
    "a key of a stage nobody knows": with_value(1, "stages", "train", "other"),
    "no params": without("stages", "train", "params"),
    "params of null": with_value(None, "stages", "train", "params"),
}


def altered(change: str) -> str:
    locked = json.loads(json.dumps(LOCKED))
    ALTERED[change](locked)
    return yaml.safe_dump(locked)


@pytest.mark.slow  # importing DVC takes 2 s
def test_what_dvc_refuses_of_its_lock_we_refuse_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from voluptuous import Invalid

    def is_refused(read: Callable[[Any], Any], given: Any) -> bool:
        try:
            read(given)
        except (Invalid, ValueError):
            return True
        return False

    monkeypatch.chdir(tmp_path)
    lock = Path("dvc.lock")
    for change in ALTERED:
        lock.write_text(altered(change))
        theirs = is_refused(COMPILED_LOCKFILE_SCHEMA, yaml.safe_load(lock.read_text()))
        assert is_refused(read_yaml, lock) == theirs, change


@pytest.mark.parametrize("kind", ["half", "a page of zeros", "empty", "garbage", "no schema", "a size in words"])
def test_a_damaged_dvc_lock_is_set_aside_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lock = Path("dvc.lock")
    lock.write_text(altered(kind if kind in ALTERED else "nothing"))
    if kind in DAMAGES:
        damage(lock, kind)
    data = lock.read_bytes()
    release_dead_locks()
    told = capsys.readouterr().err
    assert not lock.exists()
    assert Path(".dvc/tmp/dvc.lock.damaged").read_bytes() == data
    assert told.count("\n") == 1
    assert "git checkout dvc.lock || rm dvc.lock" in told


@pytest.mark.slow
def test_a_lock_cut_within_a_line_is_told_and_one_cut_between_stages_is_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut within a line it is often valid still: `path: ma` or `cmd: ech`. A stage it lacks, DVC runs again."""
    monkeypatch.chdir(tmp_path)
    lock, text = Path("dvc.lock"), altered("nothing")
    for length in range(len(text)):
        if length and text[length - 1] == "\n":
            continue
        lock.write_text(text[:length])
        with pytest.raises(ValueError, match=r"dvc\.lock: .*without it.*git checkout dvc\.lock \|\| rm dvc\.lock"):
            read_yaml(lock)
    lock.write_text(text.replace("stages:\n", "stages:\n  curate:\n    cmd: echo\n"))
    assert read_yaml(lock)["stages"].keys() == {"curate", "train"}
    lock.write_text(lock.read_text().partition("  train:")[0])
    assert read_yaml(lock)["stages"].keys() == {"curate"}


@pytest.mark.slow
def test_dvc_goes_on_after_damage_to_its_lock_and_its_notes_and_runs_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / ".dvc" / "site-cache"))
    command = [sys.executable, "-m", "dvc"]
    subprocess.run([*command, "init", "--quiet", "--no-scm"], check=True)
    Path("given").write_text("x\n")
    graph = {"stages": {"train": {"cmd": "cat given >> times && cp times made", "deps": ["given"], "outs": ["made"]}}}
    Path("dvc.yaml").write_text(yaml.safe_dump(graph))
    subprocess.run([*command, "repro", "--quiet", "train"], check=True)
    notes, lock = sorted(Path(".dvc/site-cache").rglob("cache.db")), Path("dvc.lock")
    assert notes
    repro = [*command, "repro", "--single-item", "train"]
    for files, told in (([lock], "dvc.lock.damaged"), (notes, "database of file hashes")):
        for file in files:
            damage(file, "garbage")
        assert subprocess.run(repro, capture_output=True).returncode != 0
        release_dead_locks()
        assert capsys.readouterr().err.count(told) == len(files)
        assert subprocess.run(repro, capture_output=True).returncode == 0
    assert Path("times").read_text() == "x\n"
    assert read_yaml(lock)["stages"].keys() == {"train"}
