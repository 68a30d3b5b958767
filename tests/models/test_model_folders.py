"""A model folder is what it was hashed as: nothing but its safetensors is loaded, all of them, and no code is run."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.passing_faults import PassingFault
from tasks.engines.vllm.server_process import serve_command
from tasks.engines.vllm.settings import VLLMSettings
from tasks.learning.shared.lora import Adapter
from tasks.models.folders import (
    folder_hash,
    load_config,
    load_model,
    load_tokenizer,
    merged_snapshot,
    model_config,
    save_adapter,
    weights_hash,
    write_pointer,
)
from tasks.models.settings import PLAIN_TEMPLATE, LoRASettings, TemplateSettings, on_cpu
from tasks.models.template import template_of
from tasks.planning.shapes import count_parameters
from tests import tiny

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"
RAN = "the code of the folder was run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "whole")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture
def adapter(whole: Path, tmp_path: Path) -> Path:
    settings = LoRASettings(rank=2, alpha=4, target_modules=["q_proj", "v_proj"])
    trained = Adapter(load_model(whole, compute=on_cpu(1)), settings, weights="float32")
    save_adapter(tmp_path / "adapter", trained.save, load_tokenizer(whole), base=whole)
    return tmp_path / "adapter"


def set_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def into_shards(folder: Path, name: str) -> None:
    """The weights under another name, which an index gives."""
    names = list(load_file(folder / SINGLE))
    (folder / SINGLE).rename(folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))


def pickle_beside_a_decoy(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).rename(folder / "decoy.safetensors")


def cut_to(size: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:size])


def nul_page(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(bytes(4096) + data[4096:])


def ask_to_run_code(folder: Path) -> None:
    code = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"}
    edit_json(folder / "config.json", auto_map=code, model_type="theirs")
    (folder / "theirs.py").write_text(f"raise SystemExit({RAN!r})")


def second_set(folder: Path) -> None:
    shutil.copy(folder / SINGLE, folder / "consolidated.safetensors")


def shard_outside(folder: Path) -> None:
    shutil.copy(folder / SINGLE, folder / "decoy.safetensors")
    into_shards(folder, "../outside.safetensors")


def shard_gone(folder: Path) -> None:
    into_shards(folder, "model-1.safetensors")
    (folder / "model-1.safetensors").rename(folder / "decoy.safetensors")


def no_index(folder: Path) -> None:
    into_shards(folder, "model-1.safetensors")
    (folder / INDEX).write_text("[1, 2]")


def test_on_several_gpus_each_rank_loads_onto_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies weights in threads of its own, to which the GPU that a rank chose in its main thread is
    unknown.
    """

    class Asked(BaseException):
        pass

    def ask(*_: Any, device_map: dict[str, torch.device], **__: Any) -> Any:
        raise Asked(device_map)

    folder = tiny.model_folder(tmp_path / "m")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", ask)
    with pytest.raises(Asked) as asked:
        load_model(folder, compute=on_cpu(1).model_copy(update={"device": "cuda"}))
    assert asked.value.args == ({"": torch.device("cuda", 2)},)


DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "a pickle beside a decoy": (pickle_beside_a_decoy, ("model.safetensors", "no such file")),
    "a second set of weights": (second_set, ("consolidated.safetensors", "vLLM", "Keep one set")),
    "a shard that lies outside": (shard_outside, (INDEX, "../outside.safetensors")),
    "a shard that is gone": (shard_gone, ("model-1.safetensors", "no such file")),
    "an index that is none": (no_index, (INDEX, "weight_map")),
    "a tensor too few": (
        lambda folder: set_tensors(folder / SINGLE, lambda tensors: tensors.pop(QUERY)),
        ("lack", QUERY, "random"),
    ),
    "a tensor too many": (
        lambda folder: set_tensors(folder / SINGLE, lambda tensors: tensors.update(extra=torch.zeros(2))),
        ("also contain extra",),
    ),
    "a tensor of another shape": (
        lambda folder: set_tensors(folder / SINGLE, lambda tensors: tensors.update({QUERY: torch.zeros(2, 2)})),
        ("another shape", QUERY),
    ),
    "a head of its own that is not there": (
        lambda folder: edit_json(folder / "config.json", tie_word_embeddings=False),
        ("lack", "lm_head.weight"),
    ),
    "half a file": (cut_to(50_000), ("could not be loaded", "again")),
    "an empty file": (cut_to(0), ("could not be loaded", "again")),
    "a page of zeros": (nul_page, ("could not be loaded", "again")),
    "code of its own": (ask_to_run_code, ("auto_map", "never runs")),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_not_the_model_it_says_is_refused_in_one_line(folder: Path, damage: str) -> None:
    change, told = DAMAGES[damage]
    change(folder)
    with pytest.raises(ValueError) as error:
        load_model(folder, compute=on_cpu(1))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert not [word for word in told if word not in str(error.value)], str(error.value)


@pytest.mark.parametrize("number", [1, 2])
def test_shards_and_tied_heads_are_loaded_as_one_file_is(folder: Path, whole: Path, number: int) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    shards = {f"model-{part}.safetensors": dict(list(tensors.items())[part::number]) for part in range(number)}
    for name, part in shards.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, part in shards.items() for key in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    ours, theirs = (
        load_model(folder, compute=on_cpu(1)).state_dict(),
        load_model(whole, compute=on_cpu(1)).state_dict(),
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_code_beside_an_architecture_transformers_has_is_left_alone(folder: Path) -> None:
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "theirs.M"})
    (folder / "theirs.py").write_text(f"raise SystemExit({RAN!r})")
    assert type(load_model(folder, compute=on_cpu(1))).__module__.startswith("transformers.")


def test_a_config_that_asks_for_code_is_refused_wherever_it_is_read(folder: Path) -> None:
    ask_to_run_code(folder)
    with pytest.raises(ValueError, match="auto_map"):
        load_config(folder)


def test_a_tokenizer_that_is_code_is_refused_and_not_taken_for_another(folder: Path) -> None:
    code = {"AutoTokenizer": ["theirs.T", None]}
    edit_json(folder / "tokenizer_config.json", auto_map=code, tokenizer_class="TheirTokenizer")
    (folder / "theirs.py").write_text(f"raise SystemExit({RAN!r})")
    with pytest.raises(ValueError, match=r"its tokenizer is Python code.*auto_map"):
        load_tokenizer(folder)


@pytest.mark.parametrize("text", ["", '{"tokenizer_cla', "[1, 2]", "\0" * 100])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "config.json"])
def test_a_damaged_file_beside_the_weights_names_the_folder(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    read = load_config if name == "config.json" else load_tokenizer
    with pytest.raises(ValueError) as error:
        read(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [{"hidden_size": "big"}, {"layer_types": ["theirs"]}])
def test_a_config_of_its_family_with_a_value_it_cannot_have_is_one_line_too(
    folder: Path, wrong: dict[str, Any]
) -> None:
    """Those of transformers' strict classes are no ValueError."""
    edit_json(folder / "config.json", **wrong)
    with pytest.raises(ValueError, match=r"its config\.json could not be loaded") as error:
        load_config(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_an_adapter_is_loaded_from_its_safetensors_alone(adapter: Path) -> None:
    """PEFT falls back on adapter_model.bin, a pickle, whatever else lies there."""
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").rename(adapter / "decoy.safetensors")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors.*no such file"):
        load_model(adapter, compute=on_cpu(1))


@pytest.mark.slow
@pytest.mark.parametrize("is_missing", [True, False])
def test_an_adapter_with_a_tensor_too_few_or_too_many_is_refused(adapter: Path, is_missing: bool) -> None:
    assert load_model(adapter, compute=on_cpu(1))
    name = next(iter(load_file(adapter / "adapter_model.safetensors")))
    extra = name.replace("layers.0", "layers.7")
    set_tensors(
        adapter / "adapter_model.safetensors",
        lambda tensors: tensors.pop(name) if is_missing else tensors.update({extra: torch.zeros(2, 2)}),
    )
    with pytest.raises(ValueError) as error:
        load_model(adapter, compute=on_cpu(1))
    assert (f"lack {name}" if is_missing else f"also contain {extra}") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_link_brings_no_file_from_elsewhere_into_the_registry(folder: Path, tmp_path: Path) -> None:
    """Links within the folder, to Hugging Face's cache and to DVC's stay what they are."""
    (folder / "original").mkdir()
    shutil.copy(folder / "tokenizer_config.json", folder / "original" / "config.json")
    plain = folder_hash(folder)
    for name, place in {
        "config.json": "blobs/" + "a1" * 20,
        SINGLE: "blobs/" + "b2" * 32,
        "tokenizer.json": ".dvc/cache/files/md5/c3/" + "c3" * 15,
    }.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(tmp_path / place)
        (folder / name).symlink_to(os.path.relpath(tmp_path / place, folder))
    (folder / "original" / "config.json").unlink()
    (folder / "original" / "config.json").symlink_to("../tokenizer_config.json")
    assert folder_hash(folder) == plain
    (tmp_path / "id_rsa").write_text("a key", encoding="utf-8")
    for name in ("vocab.txt", "original/notes"):
        (folder / name).symlink_to(tmp_path / "id_rsa")
        for read in (folder_hash, model_config, load_tokenizer):
            pointer = tmp_path / "pointer"
            pointer.mkdir(exist_ok=True)
            (pointer / "pointer.json").write_text(json.dumps({"path": str(folder), "folder_hash": plain}))
            with pytest.raises(ValueError, match=rf"{name}: is a link to .*id_rsa.* cp -rL {folder} COPY") as error:
                read(pointer)
            assert "\n" not in str(error.value)
        (folder / name).unlink()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "names", [("pointer.json",), ("base.json",), ("pointer.json", "base.json"), ("base.json",) * 3]
)
def test_pointers_that_lead_in_a_circle_are_refused_in_one_line(names: tuple[str, ...], tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(names))]
    for folder, name, target in zip(folders, names, [*folders[1:], folders[0]], strict=True):
        folder.mkdir()
        (folder / name).write_text(json.dumps({"path": str(target), "folder_hash": "x"}))
        (folder / "adapter_model.safetensors").touch()
    for read in (folder_hash, weights_hash, model_config, load_tokenizer, load_config):
        with pytest.raises(ValueError, match="leads back to") as error:
            read(folders[0])
        assert "\n" not in str(error.value)


def test_half_an_adapter_is_one_line(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"its LoRA adapter could not be loaded") as error:
        load_model(adapter, compute=on_cpu(1))
    assert "\n" not in str(error.value)


def test_the_hash_and_the_size_of_a_damaged_folder_are_one_line_too(folder: Path) -> None:
    cut_to(100)(folder)
    with pytest.raises(ValueError, match=r"model\.safetensors could not be loaded"):
        count_parameters(folder)
    (folder / SINGLE).rename(folder / "decoy.safetensors")
    with pytest.raises(ValueError, match="no such file"):
        weights_hash(folder)


def test_the_weights_behind_a_pointer_are_read_once_per_process_whatever_a_stage_asks_of_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(folder / SINGLE, (1e9, 1e9))
    read: list[str] = []
    counted = hashlib.file_digest

    def digest_of(stream: Any, name: str) -> Any:
        read.append(Path(stream.name).name)
        return counted(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", digest_of)
    pointer = tmp_path / "warm_start"
    write_pointer(pointer, str(folder))
    for _ in range(2):
        weights_hash(pointer), folder_hash(pointer), model_config(pointer), load_tokenizer(pointer)
    load_model(pointer, compute=on_cpu(1))
    assert read.count(SINGLE) == 1
    set_tensors(folder / SINGLE, lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(ValueError, match="changed since"):
        load_model(pointer, compute=on_cpu(1))
    assert read.count(SINGLE) == 2


def test_vllm_is_told_to_read_safetensors_and_nothing_about_code(tmp_path: Path) -> None:
    settings = VLLMSettings.model_construct(
        dtype="float32", tensor_parallel_size=1, enforce_eager=True, transfer="folder", gpu_memory_utilization=0.5
    )
    command = serve_command(
        tmp_path, settings, socket=tmp_path / "socket", max_model_len=64, max_num_seqs=2, on_gpu=True
    )
    assert command[command.index("--load-format") + 1] == "safetensors"
    assert "--trust-remote-code" not in command


# ---- what the chat template is called with


@pytest.mark.slow
def test_what_a_pointer_states_of_the_template_reaches_every_copy_of_the_model(tmp_path: Path) -> None:
    """A pointer to it, a snapshot saved from it and a merged copy call the template alike, and hash otherwise."""
    model, silent = (
        tiny.model_folder(tmp_path / "model"),
        TemplateSettings(keep_thinking=True, enable_thinking=False, kwargs={"effort": "low"}),
    )
    write_pointer(tmp_path / "plain", str(model))
    write_pointer(tmp_path / "base", str(model), template=silent)
    write_pointer(tmp_path / "pointer", str(tmp_path / "base"))
    load_tokenizer(tmp_path / "pointer").save_pretrained(tmp_path / "snapshot")
    copied = merged_snapshot(tmp_path / "pointer", tmp_path / "merged", compute=on_cpu(1))
    for folder in (tmp_path / "pointer", tmp_path / "snapshot", copied):
        assert template_of(load_tokenizer(folder)) == silent
    assert template_of(load_tokenizer(model)) == template_of(load_tokenizer(tmp_path / "plain")) == PLAIN_TEMPLATE
    assert folder_hash(tmp_path / "plain") == folder_hash(model)
    assert len({folder_hash(folder) for folder in (model, tmp_path / "base", copied)}) == 3
    assert weights_hash(copied) == weights_hash(model)
    assert merged_snapshot(tmp_path / "plain", tmp_path / "unused", compute=on_cpu(1)) == model


def test_what_params_state_of_the_template_goes_before_what_the_folder_states() -> None:
    folder = TemplateSettings(keep_thinking=True, enable_thinking=True, kwargs={"effort": "low", "day": 1})
    stated = TemplateSettings(keep_thinking=False, enable_thinking=None, kwargs={"effort": "high"})
    assert stated.over(folder).variables == {"enable_thinking": True, "effort": "high", "day": 1}
    assert not stated.over(folder).keep_thinking and not folder.over(stated).keep_thinking
    with pytest.raises(ValueError, match="kwargs contains tools"):
        TemplateSettings(keep_thinking=True, enable_thinking=None, kwargs={"tools": []})


def test_a_disk_that_does_not_answer_is_no_damaged_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **how: Any) -> None:
        raise OSError("transformers cannot load this") from OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    with pytest.raises(PassingFault, match="cannot be read now"):
        load_config(folder)


def test_a_folder_that_may_not_be_listed_is_not_one_without_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root every folder may be; `glob` and `listdir` meet the same refusal."""

    def refuse(place: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError, match=str(folder)):
        weights_hash(folder)
