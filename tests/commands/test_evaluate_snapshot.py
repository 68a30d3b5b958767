"""`evaluate-snapshot` takes every form in which a model lies in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.commands.evaluate_snapshot import find_folder
from tasks.commands.serve.versions import open_source
from tasks.core.files import write_text
from tasks.core.settings import Paths
from tasks.models.folders import save_adapter, write_pointer


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
    write_pointer(paths.stage("warm_start") / "model", str(model))
    write_pointer(snapshots / "iteration-0000", str(paths.stage("warm_start") / "model"))
    save_adapter(
        snapshots / "iteration-0040",
        lambda folder: write_text(folder / "adapter_model.safetensors", "adapter"),
        Tokenizer(),
        base=model,
    )
    return paths


def test_a_whole_model_an_adapter_and_a_pointer_are_models(paths: Paths, tmp_path: Path):
    snapshots, pointer = paths.stage("train") / "snapshots", paths.stage("warm_start") / "model"
    assert find_folder("iteration-0040", paths) == snapshots / "iteration-0040"
    assert find_folder("iteration-0000", paths) == snapshots / "iteration-0000"
    for folder in (tmp_path / "base", pointer):
        assert find_folder(str(folder), paths) == folder
    for folder in (snapshots / "iteration-0040", pointer):
        assert open_source(str(folder), tmp_path, None).name == folder.name


def test_a_folder_without_a_model_is_refused_with_the_snapshots_there_are(paths: Paths):
    with pytest.raises(ValueError, match=r"is no model.*iteration-0000, iteration-0040"):
        find_folder(str(paths.stage("train")), paths)
