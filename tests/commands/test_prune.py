"""What `prune` keeps of DVC's cache, with a real DVC: the last runs, what git's refs name and what lineages need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.commands.prune.dvc_cache import DvcCache, hashes_of, needed_hashes, old_notes
from tasks.commands.prune.prune import Removal, freed

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


def kept(cache: DvcCache, keep: int, lineages: list[str]) -> set[str]:
    """The contents that stay in the cache."""
    notes = cache.notes()
    old = old_notes(notes, keep)
    needed = cache.closure(needed_hashes([note for note in notes if note not in old], lineages))
    files = (file for md5, file in cache.all_files() if md5 in needed and not md5.endswith(".dir"))
    return {file.read_text(encoding="utf-8").strip() for file in files}


@pytest.mark.slow
def test_the_last_runs_and_what_a_branch_names_stay(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(repository)
    cache = DvcCache(Path(".dvc/cache"))
    assert kept(cache, 1, []) == {"1", "run 2", "run 5"}
    assert kept(cache, 3, []) == {"1", "run 2", "run 3", "run 4", "run 5"}
    assert kept(cache, 1, [(repository / "lock-1").read_text(encoding="utf-8")]) == {"1", "run 1", "run 2", "run 5"}


@pytest.mark.slow
def test_weights_of_a_remote_are_those_of_old_runs_alone(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(repository)
    cache = DvcCache(Path(".dvc/cache"))
    old = [note for note in old_notes(cache.notes(), 4) if "safetensors" in note.command]
    (weights,) = cache.weights(hashes_of(old[0].stage))
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


def test_a_file_with_a_link_elsewhere_frees_nothing(tmp_path: Path):
    alone, linked = tmp_path / "alone", tmp_path / "linked"
    alone.write_bytes(b"x" * 1000), linked.write_bytes(b"y" * 500)
    os.link(linked, tmp_path / "other")

    def removal(*files: Path) -> Removal:
        return Removal("here", "files", 0, lambda: None, files)

    assert freed([removal(alone, linked)]) == "1.0 kB"
    assert freed([removal(alone), removal(linked, tmp_path / "other")]) == "1.5 kB"
