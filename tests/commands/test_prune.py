"""What `prune` keeps of DVC's cache, with a real DVC: the last runs, what git's refs name and what lineages need."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from tasks.commands.prune import prune as prune_module
from tasks.commands.prune.dvc_cache import DvcCache, find_old_results, needed_hashes
from tasks.commands.prune.prune import Removal, _remove, freed, prune
from tasks.core.passing_faults import PassingFault
from tasks.core.settings import Paths
from tasks.pipeline.run_lock import AnotherRun
from tests.pipeline.project import ROOT
from tests.tracking.project import make_database

GRAPH = """
stages:
  curate: {cmd: cp source.txt data.txt, deps: [source.txt], outs: [data.txt]}
  train: {cmd: mkdir out; cp data.txt out/model.safetensors; echo 1 > out/n, deps: [data.txt], outs: [out]}
"""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs of a pipeline of two stages; the second is committed, and its dvc.lock is that of the branch."""
    folder = tmp_path_factory.mktemp("project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("git", "init", "-q")
        run("git", "config", "user.email", "a@b"), run("git", "config", "user.name", "a")
        run(sys.executable, "-m", "dvc", "init", "-q")
        Path("dvc.yaml").write_text(GRAPH, encoding="utf-8")
        for number in range(1, 6):
            Path("source.txt").write_text(f"run {number}", encoding="utf-8")
            run(sys.executable, "-m", "dvc", "repro", "-q")
            if number == 2:
                run("git", "add", "."), run("git", "commit", "-qm", "two")
            for file in Path(".dvc/cache/runs").glob("*/*/*"):
                if file.stat().st_mtime > 1e9:  # new
                    os.utime(file, (number, number))
            (folder / f"lock-{number}").write_bytes(Path("dvc.lock").read_bytes())
    return folder


@pytest.fixture
def project(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change, with the current folder in it."""
    shutil.copytree(repository, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def going(keep: int, lineages: list[str]) -> set[str]:
    """The contents that would go from the cache."""
    cache = DvcCache(Path(".dvc/cache"))
    files = cache.files(find_old_results(cache, keep, lineages).hashes)
    return {file.read_text(encoding="utf-8").strip() for file in files if file.suffix != ".dir"}


@pytest.mark.slow
def test_nothing_goes_where_the_files_of_a_kept_folder_cannot_be_read(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be those of an older run too."""
    read = Path.read_bytes

    def fail(file: Path) -> bytes:
        if file.suffix == ".dir":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(PassingFault, match="none of the cache was removed"):
        going(1, [])


def add_to_dvc(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    run(sys.executable, "-m", "dvc", "add", "-q", name)


def commit(message: str) -> None:
    run("git", "add", "."), run("git", "commit", "-qm", message)


@pytest.mark.slow
def test_the_last_runs_and_what_a_branch_names_stay(repository: Path, monkeypatch: pytest.MonkeyPatch):
    """Of runs 1 to 5 the second is the branch's; the file "1" is in all of them."""
    monkeypatch.chdir(repository)
    assert going(1, []) == {"run 1", "run 3", "run 4"}
    assert going(3, []) == {"run 1"}
    assert going(1, [(repository / "lock-1").read_text(encoding="utf-8")]) == {"run 3", "run 4"}


@pytest.mark.slow
def test_what_dvc_add_put_there_never_goes(project: Path):
    """Neither data of another branch, nor a copy of run 1's result that only a stash, or only a deleted branch has."""
    branch = run("git", "branch", "--show-current").strip()
    commit("the fifth run")
    run("git", "checkout", "-qb", "with-data")
    add_to_dvc("customers.txt", "a person's own")
    commit("data")
    run("git", "checkout", "-q", branch)
    assert not Path("customers.txt.dvc").exists()
    assert going(1, []) == {"run 1", "run 2", "run 3", "run 4"}

    add_to_dvc("first.txt", "run 1")
    run("git", "add", "."), run("git", "stash", "-q")
    assert going(1, []) == {"run 2", "run 3", "run 4"}
    run("git", "checkout", "-qb", "gone")
    add_to_dvc("third.txt", "run 3")
    commit("a result kept as data")
    run("git", "checkout", "-q", branch), run("git", "branch", "-qD", "gone")
    assert going(1, []) == {"run 2", "run 4"}


@pytest.mark.slow
def test_a_dvc_lock_in_a_stash_keeps_its_results(project: Path):
    """The stash has the fifth run's dvc.lock, the folder the second's again; of the notes the fourth is made newest."""
    run("git", "stash", "-q")
    for note in DvcCache(Path(".dvc/cache")).notes():
        if note.file.stat().st_mtime == 4:
            os.utime(note.file, (9, 9))
    assert going(1, []) == {"run 1", "run 3"}


@pytest.mark.slow
def test_a_note_stays_as_long_as_its_result_is_needed(project: Path):
    """The second run is the branch's until the branch has the fifth; without its note nobody would free it then."""
    cache = DvcCache(Path(".dvc/cache"))
    assert {note.file.stat().st_mtime for note in find_old_results(cache, 1, []).notes} == {1, 3, 4}
    commit("the fifth run")
    assert {note.file.stat().st_mtime for note in find_old_results(cache, 1, []).notes} == {1, 2, 3, 4}


@pytest.mark.slow
def test_where_git_does_not_answer_nothing_is_old(project: Path):
    Path(".git/HEAD").write_text("damaged", encoding="utf-8")
    with pytest.raises(ValueError, match=r"git rev-list .* failed"):
        going(1, [])


@pytest.mark.slow
def test_a_cache_outside_the_folder_is_left_alone(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """What another project needs of it, only its folder says. Of the runs 1, 3 and 4 it has a file and a list each."""
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    make_database(project)
    Path("artifacts/mlflow").mkdir(parents=True)
    Path("empty.db").rename("artifacts/mlflow/mlflow.db")
    Path("artifacts/ablation").mkdir()
    Path("artifacts/ablation/table.md").write_text("hm")
    with monkeypatch.context() as patch:  # a run is at work

        def refuse(artifacts: Path) -> None:
            raise AnotherRun("another flow is at work")

        patch.setattr(prune_module, "only_run", refuse)
        assert prune(keep=1, yes=False) is False
        told = capsys.readouterr().out
        assert "results of older runs, 6 files" in told and "artifacts/ablation (2 bytes)" in told
        with pytest.raises(AnotherRun):
            prune(keep=1, yes=True)

    Path(".dvc/cache").rename("../shared")
    run(sys.executable, "-m", "dvc", "cache", "dir", "-q", "../shared")
    assert prune(keep=1, yes=True) is True
    assert "dvc gc --all-commits --projects" in capsys.readouterr().out
    assert len(DvcCache(Path("../shared")).notes()) == 10


@pytest.mark.slow
def test_weights_of_a_remote_are_those_of_old_runs_alone(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(repository)
    cache = DvcCache(Path(".dvc/cache"))
    (weights,) = cache.weights(find_old_results(cache, 4, []).hashes)
    assert cache.file(weights).read_text(encoding="utf-8") == "run 1"


LINEAGE = """
stages:
  curate: {deps: [{path: raw.jsonl, md5: raw}], outs: [{path: artifacts/curate, md5: data.dir}]}
  train: {deps: [{path: models/base, md5: base.dir}, {path: artifacts/curate, md5: data.dir}],
          outs: [{path: artifacts/train, md5: weights.dir}]}
  evaluate: {deps: [{path: artifacts/train, md5: weights.dir}], outs: [{path: artifacts/evaluate, md5: scores.dir}]}
"""


def test_of_a_lineage_its_data_and_what_it_read_stay_and_its_results_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`dvc add` of newer problems or another base model leaves no other trace of the old ones."""
    monkeypatch.chdir(tmp_path)
    assert needed_hashes([], [LINEAGE]) == {"raw", "data.dir", "base.dir"}


def test_what_a_server_refuses_keeps_nothing_else_and_one_that_does_not_answer_ends_it(tmp_path: Path):
    def raise_it(error: Exception) -> None:
        raise error

    here = tmp_path / "here"
    refused = Removal("s3", "a result", 1, partial(raise_it, ValueError("s3://bucket/k could not be removed")))
    silent = Removal("s3", "a result", 1, partial(raise_it, PassingFault("s3 does not answer")))
    for found, error in ([refused, refused], None), ([silent], PassingFault):
        here.touch()
        removals = [*found, Removal("cache", "weights", 9, here.unlink, (here,))]
        with pytest.raises(error) if error else nullcontext():
            assert _remove(removals) == ["s3://bucket/k could not be removed"] * 2
        assert here.exists() == (error is not None)


def test_what_a_run_removes_while_the_list_is_made_is_not_in_it(tmp_path: Path):
    paths, gone = Paths(tmp_path), tmp_path / ".resume/train/gone"
    for name in ("older", "newest"):
        (tmp_path / ".resume/train" / name).mkdir(parents=True)
        (tmp_path / ".resume/train" / name / "state").write_bytes(b"123")
        os.utime(tmp_path / ".resume/train" / name, (1, 1 if name == "older" else 2))
    gone.symlink_to(tmp_path / "nothing")
    assert [(Path(item.place).name, item.size) for item in prune_module._of_checkpoints(paths)] == [("older", 3)]


def test_an_ablation_is_named_with_its_size_and_one_run_is_no_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    paths = Paths(tmp_path)
    prune_module._tell_what_stays(paths)
    assert not capsys.readouterr().out
    (tmp_path / "ablation/base-7/train").mkdir(parents=True)
    (tmp_path / "ablation/base-7/train/model.safetensors").write_bytes(b"x" * 1500)
    prune_module._tell_what_stays(paths)
    told = capsys.readouterr().out
    assert f"{tmp_path / 'ablation'} (1.5 kB) belongs to no run" in told and "Delete the folder" in told
    removal = Removal("here", "files", 0, lambda: None)
    for found in ([], [removal]):
        for keep, last in ((1, "the last run"), (3, "the last 3 runs")):
            prune_module._print(found, keep)
            assert last in capsys.readouterr().out


def test_a_file_with_a_link_elsewhere_frees_nothing(tmp_path: Path):
    alone, linked = tmp_path / "alone", tmp_path / "linked"
    alone.write_bytes(b"x" * 1000), linked.write_bytes(b"y" * 500)
    os.link(linked, tmp_path / "other")

    def removal(*files: Path) -> Removal:
        return Removal("here", "files", 0, lambda: None, files)

    assert freed([removal(alone, linked)]) == "1.0 kB"
    assert freed([removal(alone), removal(linked, tmp_path / "other")]) == "1.5 kB"
