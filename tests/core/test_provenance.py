"""What a stage ran with: its settings, code, data, commit, packages and machine, and the results they belong to."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.core.files import content_hash, read_json
from tasks.core.provenance import (
    code_hashes,
    git_state,
    package_versions,
    provenance,
    provenance_file,
    write_provenance,
)
from tasks.core.settings import Paths

PARAMS: dict[str, Any] = {
    "paths": {"artifacts": "results"},
    "environment": {"name": "shop"},
    "train": {"learning_rate": 0.1},
    "promote": {"minimum_success": 0.6},
}
DEPS = [
    "tasks/stages/train/stage.py",
    "tasks/${environment.name}.py",
    "${paths.artifacts}/curate/train.jsonl",
    "prices.csv",
]


def git(*arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed project of one stage, and what it reads."""
    monkeypatch.chdir(tmp_path)
    files = {
        "tasks/stages/train/stage.py": "1\n",
        "tasks/shop.py": "1\n",
        "tasks/bank.py": "2\n",
        "prices.csv": "1\n",
        "dvc.lock": "schema: '2.0'\nstages: {}\n",
        "dvc.yaml": yaml.safe_dump({"stages": {"train": {"deps": DEPS}}}),
        "params.yaml": yaml.safe_dump(PARAMS),
        "results/curate/train.jsonl": "{}\n",
        "results/train/model": "weights",
        ".gitignore": "/results/\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        git(*command)
    return tmp_path


def record() -> dict[str, Any]:
    return provenance("train", {"train": PARAMS["train"]}, Paths("results"), num_threads=2, device="cpu")


def test_a_record_says_what_the_stage_ran_with(repository: Path):
    row = record()
    assert row["settings"] == {"train": {"learning_rate": 0.1}}
    assert (len(row["git_commit"]), row["git_dirty"], row["num_threads"]) == (40, "false", 2)
    assert list(row["code"]) == ["tasks/shop.py", "tasks/stages/train/stage.py"]
    assert list(row["data"]) == ["artifacts/curate/train.jsonl", "prices.csv"]  # wherever params.yaml puts results
    assert row["dvc_lock_hash"] == content_hash(Path("dvc.lock"))
    assert row["packages"]["pydantic"] == metadata.version("pydantic")
    assert {"python", "platform", "cpu"} <= row.keys()
    assert str(repository) not in json.dumps(row)


def test_equal_runs_have_equal_records(repository: Path):
    assert record() == record()


def test_a_record_is_of_the_start_of_the_run_and_of_the_results_at_its_end(repository: Path):
    row = record()
    Path("tasks/stages/train/stage.py").write_text("edited while it ran\n", encoding="utf-8")
    Path("results/train/model").write_text("better", encoding="utf-8")
    write_provenance(row, Paths("results"))
    written = read_json(provenance_file("train", Paths("results")))
    assert written == {**row, "outs": content_hash(Path("results/train"))}
    assert written["code"] != code_hashes("train")


@pytest.mark.parametrize(
    ("file", "part"), [("tasks/shop.py", "code"), ("prices.csv", "data"), ("results/curate/train.jsonl", "data")]
)
def test_other_code_or_data_has_another_hash(repository: Path, file: str, part: str):
    before = record()
    Path(file).write_text("2\n", encoding="utf-8")
    after = record()
    assert [name for name in before if before[name] != after[name] and not name.startswith("git")] == [part]
    assert len({*before[part].items()} - {*after[part].items()}) == 1


def test_each_file_of_a_folder_has_a_hash_of_its_own_and_compiled_code_has_none(repository: Path):
    deps = yaml.safe_dump({"stages": {"train": {"deps": ["tasks/stages", "tasks/absent"]}}})
    Path("dvc.yaml").write_text(deps, encoding="utf-8")
    (compiled := Path("tasks/stages/__pycache__")).mkdir()
    (compiled / "stage.cpython-311.pyc").write_bytes(b"1")
    Path("tasks/stages/rules.json").write_text("{}", encoding="utf-8")
    assert list(code_hashes("train")) == ["tasks/absent", "tasks/stages/rules.json", "tasks/stages/train/stage.py"]
    assert code_hashes("train")["tasks/absent"] == "none"


def test_another_world_is_other_code(repository: Path):
    Path("params.yaml").write_text(yaml.safe_dump({**PARAMS, "environment": {"name": "bank"}}), encoding="utf-8")
    assert list(code_hashes("train")) == ["tasks/bank.py", "tasks/stages/train/stage.py"]


def test_a_missing_dep_is_left_for_the_stage_to_tell(repository: Path):
    Path("results/curate/train.jsonl").unlink()
    assert record()["data"]["artifacts/curate/train.jsonl"] == "none"


def test_packages_are_sorted_and_named_as_pip_compares_them():
    names = list(package_versions())
    assert names == sorted(names)
    assert "typing-extensions" in names and "pyyaml" in names
    assert not [name for name in names if name != name.lower() or "_" in name or "." in name]


def test_a_committed_tree_is_clean_and_named_by_its_commit(repository: Path):
    commit, is_dirty = git_state(repository)
    assert len(commit) == 40
    assert is_dirty == "false"


@pytest.mark.parametrize("name", ["dvc.lock", "params.yaml"])
def test_what_a_version_keeps_does_not_make_a_tree_dirty(repository: Path, name: str):
    (repository / name).write_text("stages: {a: 1}\n", encoding="utf-8")
    assert git_state(repository)[1] == "false"


@pytest.mark.parametrize("name", ["tasks/stages/train/stage.py", "new.py", "tasks/params.yaml"])
def test_a_changed_or_new_file_makes_it_dirty(repository: Path, name: str):
    (repository / name).write_text("2\n", encoding="utf-8")
    assert git_state(repository)[1] == "true"


def test_a_project_in_a_folder_of_a_repository_has_params_of_its_own(repository: Path):
    (repository / "tasks" / "params.yaml").touch()
    git("add", "-A")
    git("commit", "-qm", "second")
    (repository / "tasks" / "params.yaml").write_text("2\n", encoding="utf-8")
    assert git_state(repository / "tasks")[1] == "false"


def test_outside_git_the_commit_is_none_and_nobody_knows_whether_it_is_clean(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == ("none", "unknown")
