"""Weights are saved, merged and loaded shard by shard, in the dtype asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.core.files import read_json
from tasks.learning.shared.lora import Adapter
from tasks.models import folders, saving
from tasks.models.folders import (
    folder_hash,
    generation_end_ids,
    load_model,
    load_tokenizer,
    merged_snapshot,
    save_adapter,
    save_snapshot,
    stored_dtype,
)
from tasks.models.settings import LoRASettings, on_cpu
from tests import tiny

CPU = on_cpu(1)
LORA = LoRASettings(rank=2, alpha=4, target_modules="all-linear")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "whole")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def split(whole: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> Path:
    monkeypatch.setattr(saving, "MAX_SHARD_BYTES", 40_000)
    save_snapshot(folder, load_model(whole, compute=CPU), load_tokenizer(whole), dtype=dtype)
    return folder


def train_adapter(base: Path, folder: Path) -> Path:
    """An adapter of which no tensor is zero."""
    adapter = Adapter(load_model(base, compute=CPU), LORA, weights="float32")
    generator = torch.Generator().manual_seed(1)
    for tensor in adapter.tensors("default").values():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    save_adapter(folder, adapter.save, load_tokenizer(base), base=base)
    return folder


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_saved_model_has_the_files_that_transformers_writes(architecture: str, tmp_path: Path) -> None:
    saved = tiny.model_folder(tmp_path / "ours", architecture)
    load_model(saved, compute=CPU).save_pretrained(tmp_path / "theirs")
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (saved / file.name).read_bytes(), file.name


VICUNA = {"max_length": 4096, "pad_token_id": -1, "temperature": 0.9, "top_p": 0.6}


@pytest.mark.parametrize("published", [VICUNA, {"early_stopping": True}, {"output_scores": True}])
def test_a_generation_config_that_transformers_would_refuse_to_write_is_kept(
    whole: Path, tmp_path: Path, published: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a snapshot, and by a merged one whose files name the weights otherwise."""
    base = Path(shutil.copytree(whole, tmp_path / "base"))
    (base / "generation_config.json").write_text(json.dumps({**published, "eos_token_id": [5, 7]}))
    model, tokenizer = load_model(base, compute=CPU), load_tokenizer(base)
    saving.rehearse_saving(base, model, tokenizer)
    save_snapshot(tmp_path / "snapshot", model, tokenizer)
    adapter = train_adapter(base, tmp_path / "adapter")
    monkeypatch.setattr(folders, "merge_files", lambda *_: False)
    merged = merged_snapshot(adapter, tmp_path / "merged", compute=CPU)
    for folder in (tmp_path / "snapshot", merged):
        assert read_json(folder / "generation_config.json").items() >= published.items()
        assert generation_end_ids(folder) == [5, 7]


def test_what_cannot_be_written_again_is_refused_in_one_line(whole: Path) -> None:
    model, tokenizer = load_model(whole, compute=CPU), load_tokenizer(whole)
    tokenizer.init_kwargs["odd"] = {1, 2}  # no JSON
    with pytest.raises(ValueError, match=r"whole: .*cannot write them again .*set model.path") as told:
        saving.rehearse_saving(whole, model, tokenizer)
    assert "\n" not in str(told.value)


def test_a_snapshot_has_the_dtype_asked_for_and_loads_as_it_was_rounded(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = split(whole, tmp_path / "shards", monkeypatch, torch.bfloat16)
    assert len(list(shards.glob("*.safetensors"))) > 3
    assert (stored_dtype(shards), stored_dtype(whole)) == (torch.bfloat16, torch.float32)
    ours, before = load_model(shards, compute=CPU).state_dict(), load_model(whole, compute=CPU).state_dict()
    assert all(torch.equal(ours[name], before[name].bfloat16().float()) for name in before)
    narrow = load_model(shards, compute=CPU, dtype="bfloat16")
    assert narrow.dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_by_shards_gives_the_files_of_the_base_with_scale_times_b_times_a_added(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    base = split(whole, tmp_path / "base", monkeypatch, dtype)
    snapshot = train_adapter(base, tmp_path / "snapshot")
    merged = merged_snapshot(snapshot, tmp_path / "merged", compute=CPU)
    assert {file.name for file in merged.iterdir()} == {file.name for file in base.iterdir()}
    changed, before, adapter = weights_of(merged), weights_of(base), load_file(snapshot / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    expected = (before[f"{name}.weight"].float() + b @ a * 2).to(dtype)  # alpha 4 / rank 2
    assert torch.equal(changed[f"{name}.weight"], expected)
    assert {key for key in before if torch.equal(before[key], changed[key])} == {
        key for key in before if "norm" in key or "embed" in key
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_that_plays_is_the_merged_snapshot_to_the_bit(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    snapshot = train_adapter(split(whole, tmp_path / "base", monkeypatch, dtype), tmp_path / "snapshot")
    merged = merged_snapshot(snapshot, tmp_path / "merged", compute=CPU)
    played, registered = load_model(snapshot, compute=CPU).state_dict(), load_model(merged, compute=CPU).state_dict()
    assert all(torch.equal(played[name], registered[name]) for name in registered)
    assert load_tokenizer(merged).get_vocab() == load_tokenizer(snapshot).get_vocab()


@pytest.mark.slow
def test_an_adapter_of_an_adapter_is_merged_inside_out(whole: Path, tmp_path: Path) -> None:
    outer = train_adapter(train_adapter(whole, tmp_path / "inner"), tmp_path / "outer")
    merged = merged_snapshot(outer, tmp_path / "merged", compute=CPU)
    played = load_model(outer, compute=CPU).state_dict()
    assert all(torch.equal(tensor, played[name]) for name, tensor in weights_of(merged).items())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights_of(whole)[name], weights_of(merged)[name])


@pytest.mark.slow
def test_files_that_name_the_weights_otherwise_are_merged_through_the_model(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = train_adapter(whole, tmp_path / "snapshot")
    by_shards = merged_snapshot(snapshot, tmp_path / "by_shards", compute=CPU)
    monkeypatch.setattr(folders, "merge_files", lambda *_: False)
    assert folder_hash(merged_snapshot(snapshot, tmp_path / "loaded", compute=CPU)) == folder_hash(by_shards)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_that_is_more_than_a_product_is_refused(whole: Path, tmp_path: Path, odd: dict[str, Any]) -> None:
    from tests.models.test_model_folders import edit_json

    snapshot = train_adapter(whole, tmp_path / "snapshot")
    edit_json(snapshot / "adapter_config.json", **odd)
    with pytest.raises(ValueError, match=next(iter(odd))):
        merged_snapshot(snapshot, tmp_path / "merged", compute=CPU)
    assert not (tmp_path / "merged").exists()


def test_a_base_of_another_shape_is_refused_and_nothing_is_left(whole: Path, tmp_path: Path) -> None:
    snapshot = train_adapter(whole, tmp_path / "snapshot")
    wider = tiny.EMBEDDED.model_copy(update={"intermediate_size": 128})
    other = tiny.model_folder(tmp_path / "other", embedded=wider)
    from tests.models.test_model_folders import edit_json

    edit_json(snapshot / "base.json", path=str(other), folder_hash=folder_hash(other))
    with pytest.raises(ValueError, match="another shape"):
        merged_snapshot(snapshot, tmp_path / "merged", compute=CPU)
    assert [item.name for item in tmp_path.iterdir() if "merged" in item.name] == []
