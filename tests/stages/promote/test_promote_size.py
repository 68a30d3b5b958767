"""A version is stored once, and each weight file is read at most twice on the way; with the project of
`test_promote.py`.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors

from tasks.commands.fetch import fetch
from tasks.core import files
from tasks.learning.shared.lora import Adapter
from tasks.models.folders import load_model, load_tokenizer, save_adapter
from tasks.models.settings import LoRASettings, on_cpu
from tests import tiny
from tests.opened import counting_reads
from tests.stages.promote.test_promote import Pipeline, pipeline

__all__ = ["pipeline"]
pytestmark = pytest.mark.slow
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As weights of many GB are: written more than 2 s before they are hashed. And no hash is known yet."""
    monkeypatch.setattr(files, "SETTLED_NANOSECONDS", 0)
    monkeypatch.setattr(files, "_hashes", {})


def protect(snapshot: Path) -> None:
    (snapshot / WEIGHTS).chmod(0o444)


def promote(pipeline: Pipeline) -> Counter[str]:
    """Reads of the weights of the snapshot and the registry in a promotion that measured nothing again."""
    files._hashes.clear()
    with counting_reads(WEIGHTS) as reads:
        assert pipeline.promote()["decision"] == "promote"
    assert not pipeline.measured
    return reads


def stored_weights() -> list[Path]:
    return list(Path("artifacts/mlflow/artifacts").rglob(WEIGHTS))


def test_weights_nobody_may_write_are_linked_into_the_store_and_read_once(pipeline: Pipeline) -> None:
    pipeline.evaluate(0.9, complete=protect)
    reads = promote(pipeline)
    snapshot = pipeline.paths.stage("train") / "snapshots" / "iteration-0010" / WEIGHTS
    (stored,) = stored_weights()
    assert stored.samefile(snapshot)
    of_the_version = [count for path, count in reads.items() if "iteration-0010" in path or "mlflow" in path]
    assert of_the_version == [1]
    assert pipeline.champion() == (1, 0.9)


def test_weights_that_may_be_edited_are_copied_and_an_edit_leaves_the_version_as_it_was(pipeline: Pipeline) -> None:
    pipeline.evaluate(0.9)
    reads = promote(pipeline)
    snapshot = pipeline.paths.stage("train") / "snapshots" / "iteration-0010" / WEIGHTS
    assert {path: count for path, count in reads.items() if count > 2} == {}
    snapshot.write_bytes(b"0.1")
    assert pipeline.champion() == (1, 0.9)


def test_a_file_system_without_links_gets_one_copy(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    pipeline.evaluate(0.9, complete=protect)
    reads = promote(pipeline)
    assert [(path.stat().st_nlink, path.read_bytes()) for path in stored_weights()] == [(1, b"0.9")]
    assert {path: count for path, count in reads.items() if count > 2} == {}


def test_a_fetch_reads_what_is_stored_once_and_what_it_wrote_once(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.evaluate(0.9, complete=protect)
    promote(pipeline)
    files._hashes.clear()
    with counting_reads(WEIGHTS) as reads:
        fetch("models:/travel-desk-agent@champion", tmp_path / "fetched", "sqlite:///artifacts/mlflow/mlflow.db")
    assert sorted(reads.values()) == [1, 1]
    fetched = tmp_path / "fetched" / WEIGHTS
    assert not fetched.samefile(stored_weights()[0])
    assert fetched.stat().st_mode & stat.S_IWUSR


def test_an_adapter_and_its_base_are_read_twice_to_hash_and_to_merge(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = pipeline.paths.start_model

    def become_adapter(snapshot: Path) -> None:
        for folder in (base, snapshot):
            shutil.rmtree(folder)
        tiny.model_folder(base)
        lora = LoRASettings(rank=2, alpha=4, target_modules="all-linear")
        adapter = Adapter(load_model(base, compute=on_cpu(1)), lora, weights="float32")
        save_adapter(snapshot, adapter.save, load_tokenizer(base), base=base)

    merged: Counter[str] = Counter()
    open_mapped = safetensors.safe_open

    def note(file: Path, **options: Any) -> Any:
        merged[file.parent.name] += 1
        return open_mapped(file, **options)

    pipeline.evaluate(0.9, complete=become_adapter)
    monkeypatch.setattr(safetensors, "safe_open", note)
    files._hashes.clear()
    with counting_reads(".safetensors") as opened:
        assert pipeline.promote()["decision"] == "promote"
    assert merged == {"model": 1}
    # The base is hashed, and opened for its header; the adapter is hashed, as what was merged is once.
    assert {Path(path).parent.name: count for path, count in opened.items()} == {
        "model": 2, "iteration-0010": 1, "merged": 1,
    }  # fmt: skip
