"""What promotion finds to differ between what the stages ran with and what is here now, each in one line."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import content_hash, read_json, write_json
from tasks.core.provenance import RECORDED, provenance, provenance_file, write_provenance
from tasks.core.settings import Paths, read_params
from tasks.stages.promote.origin import Edit, find_edit, read_origin
from tests.damage import OF_JSON

PATHS = Paths("artifacts")
PARAMS = """\
# of the demo
paths: {artifacts: artifacts}
seed: 7
curate: {source: problems.jsonl}
assess: {num_problems: 10}
train: {learning_rate: 1.0e-5, betas: [0.9, 0.98]}
evaluate: {samples: 2, mode: "off", is_strict: yes}
promote: {minimum_success: 0.6}
"""
SECTIONS = {
    "curate": ["curate", "seed"], "assess": ["assess", "seed"], "warm_start": ["seed"], "train": ["train", "seed"],
    "evaluate": ["evaluate", "seed"],
}  # fmt: skip
RESULTS = "${paths.artifacts}"
DEPS = {
    "curate": ["${curate.source}", "tasks/world.py", "tasks/custom"],
    "assess": ["tasks/assess.py", f"{RESULTS}/curate/train.jsonl"],
    "warm_start": ["tasks/warm_start.py", f"{RESULTS}/curate/train.jsonl", f"{RESULTS}/assess"],
    "train": [
        "tasks/world.py",
        "tasks/train.py",
        f"{RESULTS}/curate/train.jsonl",
        f"{RESULTS}/warm_start",
    ],
    "evaluate": ["tasks/world.py", f"{RESULTS}/curate/test.jsonl", f"{RESULTS}/train"],
}
LEFT = {
    "curate": ["train.jsonl", "test.jsonl"], "assess": ["baseline.json"], "warm_start": ["model/weights"],
    "train": ["snapshots/iteration-0010/weights"], "evaluate": ["evaluation.json"],
}  # fmt: skip


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def run_by_hand(stage: str, made: str = "made") -> None:
    params = read_params()
    record = provenance(
        stage, {name: params[name] for name in SECTIONS[stage]}, PATHS, num_threads=2, device="cpu, x86_64"
    )
    shutil.rmtree(PATHS.stage(stage), ignore_errors=True)
    for name in LEFT[stage]:
        write(f"artifacts/{stage}/{name}", f"{made} by {stage}")
    write_provenance(record, PATHS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose stages ran one after another; no git, no DVC."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write("params.yaml", PARAMS)
        write("dvc.yaml", yaml.safe_dump({"stages": {stage: {"deps": deps} for stage, deps in DEPS.items()}}))
        write("problems.jsonl", "{}\n")
        for name in ("world", "assess", "warm_start", "train", "custom/checker"):
            write(f"tasks/{name}.py", "1\n")
        for stage in RECORDED:
            run_by_hand(stage)
    return folder


@pytest.fixture
def project(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def edit(file: str, old: str, new: str) -> None:
    text = Path(file).read_text(encoding="utf-8")
    assert old in text
    Path(file).write_text(text.replace(old, new), encoding="utf-8")


def refused() -> str:
    with pytest.raises(ValueError) as caught:
        read_origin(PATHS)
    told = str(caught.value)
    assert "\n" not in told and "dvc repro" in told and "promote again" in told
    return told


@pytest.mark.slow
def test_results_of_todays_settings_have_an_origin_with_params_as_they_were_written(project: None):
    origin = read_origin(PATHS)
    assert origin.params_text == PARAMS  # comments too
    assert origin.records["train"]["settings"] == {"train": {"learning_rate": 1e-5, "betas": [0.9, 0.98]}, "seed": 7}
    assert (origin.lock, origin.lock_hash) == (None, "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("params.yaml", "1.0e-5", "0.5", "train: it ran with train.learning_rate = 1e-05, and params.yaml has 0.5"),
        (
            "params.yaml",
            "0.98",
            "0.99",
            "train: it ran with train.betas = [0.9, 0.98], and params.yaml has [0.9, 0.99]",
        ),
        ("params.yaml", "samples: 2", "samples: 3", "evaluate: it ran with evaluate.samples = 2"),
        ("params.yaml", "num_problems: 10", "num_problems: 10, more: 1", "assess: it ran with assess.more = nothing"),
        ("params.yaml", "seed: 7", "seed: 8", "curate: it ran with seed = 7, and params.yaml has 8"),
        ("tasks/train.py", "1", "2", "train: tasks/train.py was changed"),
        ("tasks/custom/checker.py", "1", "2", "curate: tasks/custom/checker.py was changed"),
        ("artifacts/curate/test.jsonl", "made", "edited", "curate: artifacts/curate is not what it left"),
        ("artifacts/evaluate/evaluation.json", "made", "edited", "evaluate: artifacts/evaluate is not what it left"),
    ],
)
def test_what_was_changed_since_a_stage_ran_is_named(project: None, file: str, old: str, new: str, named: str):
    edit(file, old, new)
    assert named in refused()


def test_a_file_that_is_new_in_a_watched_folder_or_gone_from_it_is_named_and_compiled_code_is_not(project: None):
    write("tasks/custom/__pycache__/checker.cpython-311.pyc", "compiled")
    read_origin(PATHS)
    write("tasks/custom/mine.py", "1\n")
    assert "curate: tasks/custom/mine.py was added" in refused()
    Path("tasks/custom/checker.py").rename("tasks/custom/mine.py")
    assert "curate: tasks/custom/checker.py was removed; tasks/custom/mine.py was added" in refused()


def test_problems_that_came_after_curate_had_read_its_source_are_the_next_runs(project: None):
    record = read_json(provenance_file("curate", PATHS))
    for locked in (False, True):
        if locked:
            lock()
        write("problems.jsonl", "{}\n{}\n" if locked else "{}\n[]\n")
        assert find_edit("train", PATHS) is None
        assert read_origin(PATHS).records["curate"] == record
        write("problems.jsonl", "{}\n")
    write("problems.jsonl", "{}\n{}\n")
    lock()  # as after `dvc commit -f curate`: DVC now says that curate read what came later
    assert "curate: problems.jsonl was changed" in refused()


def test_what_only_promotion_reads_may_change(project: None):
    edit("params.yaml", "minimum_success: 0.6", "minimum_success: 0.9")
    edit("params.yaml", "# of the demo", "# of mine")
    assert read_origin(PATHS).params["promote"] == {"minimum_success": 0.9}


def test_a_stage_run_again_by_hand_with_another_result_makes_those_after_it_stale(project: None):
    run_by_hand("warm_start", made="made otherwise")
    assert refused().startswith("train: artifacts/warm_start was changed")


def test_a_stage_run_again_by_hand_with_the_same_result_does_not(project: None):
    run_by_hand("warm_start")
    read_origin(PATHS)


def test_a_change_that_was_taken_back_is_none(project: None):
    edit("params.yaml", "1.0e-5", "0.5")
    edit("params.yaml", "0.5", "1.0e-5")
    read_origin(PATHS)


def test_a_stage_trained_under_an_edit_that_was_taken_back_is_told(project: None):
    edit("params.yaml", "1.0e-5", "0.5")
    run_by_hand("train")
    edit("params.yaml", "0.5", "1.0e-5")
    assert "train: it ran with train.learning_rate = 0.5, and params.yaml has 1e-05" in refused()


def test_no_more_than_three_differences_are_told_in_a_line(project: None):
    for name in ("world", "train"):
        edit(f"tasks/{name}.py", "1", "2")
    edit("params.yaml", "learning_rate: 1.0e-5, betas: [0.9, 0.98]", "new: 1")
    run_by_hand("curate")
    assert "train.new" in (told := refused()) and told.startswith("train: ") and " and 2 more" in told


def test_an_edit_is_found_once_a_stage_that_reads_it_has_run(project: None):
    for stage in ("train", "evaluate"):
        shutil.rmtree(PATHS.stage(stage))
        provenance_file(stage, PATHS).unlink()
    edit("params.yaml", "1.0e-5", "0.5")
    assert find_edit("warm_start", PATHS) is None
    run_by_hand("train")
    edit("params.yaml", "0.5", "1.0e-5")
    told = "train: it ran with train.learning_rate = 0.5, and params.yaml has 1e-05"
    assert find_edit("train", PATHS) == Edit("train", told, in_lock=False)


def test_a_stage_that_began_with_an_edit_is_told_from_one_during_which_it_was_made(project: None):
    """Undoing it repeats the first, and nothing after the second."""
    edit("tasks/world.py", "1", "2")
    for stage, is_in_last in (("train", False), ("evaluate", False)):
        assert find_edit(stage, PATHS) == Edit("curate", "curate: tasks/world.py was changed", False, is_in_last)
    run_by_hand("evaluate")
    assert find_edit("evaluate", PATHS) == Edit("curate", "curate: tasks/world.py was changed", False, True)


def remove(file: Path) -> None:
    file.unlink()


def of_another_stage(file: Path) -> None:
    shutil.copy(provenance_file("train", PATHS), file)


@pytest.mark.parametrize(
    ("damage", "named"),
    [(remove, "does not exist"), (of_another_stage, "it is the record of 'train'"), *((kind, "") for kind in OF_JSON)],
)
def test_a_record_that_is_missing_or_damaged_or_anothers_is_told_with_the_way_back(
    project: None, damage: Callable[[Path], None] | str, named: str
):
    file = provenance_file("evaluate", PATHS)
    if callable(damage):
        damage(file)
    else:
        file.write_bytes(OF_JSON[damage](file.read_bytes()))
    with pytest.raises(ValueError, match=r"provenance/evaluate\.json.*dvc repro") as caught:
        read_origin(PATHS)
    assert "\n" not in str(caught.value) and named in str(caught.value)


def lock(**changes: Callable[[dict[str, Any]], None]) -> None:
    """dvc.lock as DVC would write it now, and then `changes` to the entries of stages."""

    def md5(path: Path) -> str:
        return hashlib.md5(path.read_bytes() if path.is_file() else content_hash(path).encode()).hexdigest()

    stages: dict[str, dict[str, Any]] = {}
    for stage in RECORDED:
        deps = [
            Path(dep.replace(RESULTS, "artifacts").replace("${curate.source}", "problems.jsonl")) for dep in DEPS[stage]
        ]
        outs = [PATHS.stage(stage), provenance_file(stage, PATHS)]
        params = read_params()
        stages[stage] = {
            "cmd": f"python -m tasks {stage}",
            "params": {"params.yaml": {name: params[name] for name in SECTIONS[stage]}},
            "deps": [{"path": str(path), "hash": "md5", "md5": md5(path)} for path in deps],
            "outs": [{"path": str(path), "hash": "md5", "md5": md5(path)} for path in outs],
        }
        if stage in changes:
            changes[stage](stages[stage])
    text = yaml.safe_dump({"schema": "2.0", "stages": stages})
    # As DVC, which speaks YAML 1.2, writes what PyYAML reads otherwise.
    for ours, of_dvc in (("1.0e-05", "1e-05"), ("mode: 'off'", "mode: off"), ("is_strict: true", "is_strict: yes")):
        text = text.replace(ours, of_dvc)
    write("dvc.lock", text)


def test_the_lock_that_goes_with_the_results_is_kept_as_it_is(project: None):
    lock()
    origin = read_origin(PATHS)
    assert origin.lock == Path("dvc.lock").read_bytes()
    assert origin.lock_hash == content_hash(Path("dvc.lock"))


def test_a_lock_of_other_settings_code_data_or_another_run_is_told(project: None):
    def train_with(value: float) -> Callable[[dict[str, Any]], None]:
        return lambda entry: entry["params"]["params.yaml"]["train"].update(learning_rate=value)

    lock(train=train_with(0.5))
    assert "train: dvc.lock: it has train.learning_rate = 0.5, and params.yaml has 1e-05" in refused()
    lock(train=lambda entry: entry["deps"][1].update(md5="0" * 32))
    assert "train: dvc.lock: tasks/train.py was changed" in refused()
    lock(warm_start=lambda entry: entry["outs"][0].update(md5="0" * 32))
    assert "train: dvc.lock: artifacts/warm_start was changed" in refused()
    lock()
    Path("dvc.lock").rename("before.lock")
    edit("params.yaml", "seed: 7", "seed: 8")
    for stage in RECORDED:
        run_by_hand(stage)
    edit("before.lock", "seed: 7", "seed: 8")
    Path("before.lock").rename("dvc.lock")
    assert "curate: dvc.lock: it is of another run of curate" in (told := refused())
    assert "`dvc commit -f curate`" in told


def test_a_damaged_lock_is_told_with_the_way_back(project: None):
    write("dvc.lock", "schema: '2.0'\nstages: {train: {cm")
    with pytest.raises(ValueError, match=r"dvc\.lock: .*git checkout dvc\.lock \|\| rm dvc\.lock"):
        read_origin(PATHS)


def test_a_record_has_the_shape_that_readers_need(project: None):
    file = provenance_file("train", PATHS)
    row = read_json(file)
    write_json(file, {name: value for name, value in row.items() if name != "outs"})
    with pytest.raises(ValueError, match=r"not of the shape.*outs.*`dvc repro train`"):
        read_origin(PATHS)
    assert json.dumps(row).count(str(Path.cwd())) == 0
