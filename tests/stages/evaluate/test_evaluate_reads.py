"""evaluate reads the weights of a model twice, to hash and to load them, however many rounds of the race it plays."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import transformers

from tasks.core import files, machine
from tasks.core.files import read_json, write_jsonl
from tasks.core.settings import Paths
from tasks.learning.shared.lora import Adapter
from tasks.models.folders import load_model, load_tokenizer, save_adapter, write_pointer
from tasks.models.settings import LoRASettings, on_cpu
from tests import tiny
from tests.opened import counting_reads
from tests.stages.evaluate.stage_folder import PROBLEMS, evaluated, files_of
from tests.stages.evaluate.test_evaluate import paths as paths

pytestmark = pytest.mark.slow
SNAPSHOTS = ("iteration-0001", "iteration-0002", "iteration-0003")
# Three rounds, of 2, 4 and 8 problems. The untrained solve none, so chance drops nobody but for want of a place.
RACING = {"error_rate": 0.05, "num_rounds": 3, "min_problems": 2, "max_finalists": 2}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the weights of each folder were loaded, for a model or as an adapter's. Files count as settled at once,
    as those of hours ago are.
    """
    monkeypatch.setattr(files, "SETTLED_NANOSECONDS", 0)
    found: Counter[str] = Counter()
    load_whole, load_file = transformers.AutoModelForCausalLM.from_pretrained, safetensors.torch.load_file

    def note_whole(folder: Path, **options: Any) -> Any:
        found[str(folder / "model.safetensors")] += 1
        return load_whole(folder, **options)

    def note_file(file: Path, **options: Any) -> Any:
        found[str(file)] += 1
        return load_file(file, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", note_whole)
    monkeypatch.setattr(safetensors.torch, "load_file", note_file)
    return found


def read(paths: Paths, loads: Counter[str]) -> Counter[str]:
    """How often each file of weights was read by the whole stage."""
    loads.clear()
    files._hashes.clear()
    with counting_reads(".safetensors") as hashed:
        evaluated(paths, None, racing=RACING)
    return hashed + loads


def test_each_file_of_weights_is_hashed_once_and_one_model_is_built_with_room_or_without(
    paths: Paths, loads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that plays is loaded too, as the engine's own model."""
    write_jsonl(paths.split("select"), (problem.model_dump() for problem in PROBLEMS[:8]))
    base = tiny.model_folder(paths.artifacts / "base", seed=9)
    write_pointer(paths.base_model, str(base))
    snapshots = [
        tiny.model_folder(paths.stage("train") / "snapshots" / name, seed=n) for n, name in enumerate(SNAPSHOTS)
    ]
    reads = read(paths, loads)
    warm_start = paths.start_model
    once = {str(folder / "model.safetensors"): 1 for folder in (base, warm_start, *snapshots)}
    assert reads == {**once, str(snapshots[0] / "model.safetensors"): 2}
    rounds = read_json(paths.stage("evaluate") / "evaluation.json")["racing"]["rounds"]
    assert [(row["num_problems"], len(row["snapshots"])) for row in rounds] == [(2, 3), (4, 3), (8, 2)]

    roomy = files_of(paths)
    monkeypatch.setattr(machine, "available_memory", lambda: 0.0)
    assert read(paths, loads) == reads
    assert files_of(paths) == roomy


def test_the_adapters_of_lora_snapshots_are_read_again_only_without_room_and_their_base_is_built_once(
    paths: Paths, loads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(paths.stage("train") / "snapshots")
    base = tiny.model_folder(paths.artifacts / "base", seed=9)
    write_pointer(paths.base_model, str(base))
    write_pointer(paths.start_model, str(base))
    for name in SNAPSHOTS:
        adapter = Adapter(
            load_model(base, compute=on_cpu(1)),
            LoRASettings(rank=2, alpha=4, target_modules="all-linear"),
            weights="float32",
        )
        folder = paths.stage("train") / "snapshots" / name
        save_adapter(folder, adapter.save, load_tokenizer(base), base=base)
    adapters = [paths.stage("train") / "snapshots" / name / "adapter_model.safetensors" for name in SNAPSHOTS]
    whole = str(base / "model.safetensors")
    assert read(paths, loads) == {**{str(file): 2 for file in adapters}, whole: 2}

    roomy = files_of(paths)
    monkeypatch.setattr(machine, "available_memory", lambda: 0.0)
    again = read(paths, loads)
    assert again[whole] == 2
    assert max(again[str(file)] for file in adapters) > 2
    assert files_of(paths) == roomy
