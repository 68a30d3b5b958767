"""A model folder that cannot be played is refused by its headers and JSON, by `plan`, the doctor and the stages alike;
a number that is not finite where the weights are read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tasks.chat.format import load_chat
from tasks.models.differences import refuse_what_is_not_finite
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.planning.family import check_family
from tasks.planning.shapes import count_parameters, find_shape
from tests import tiny
from tests.profiles import profile_params

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "whole")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def set_query(folder: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(QUERY))
    tensors |= {} if changed is None else {QUERY: changed}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.flatten().index_fill(0, torch.tensor([3]), value).view_as(tensor)


def add_tokens(folder: Path, *tokens: str, is_special: bool = False) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, special=is_special) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "whole numbers": (lambda folder: set_query(folder, lambda tensor: tensor.to(torch.int8)), (QUERY, "I8", "float32")),
    "eight bits": (
        lambda folder: set_query(folder, lambda tensor: tensor.to(torch.float8_e4m3fn)),
        (QUERY, "F8_E4M3", "bfloat16"),
    ),
    "a tensor too few": (lambda folder: set_query(folder, lambda _: None), ("lack", QUERY)),
    "a tensor of another shape": (lambda folder: set_query(folder, lambda tensor: tensor[:2].clone()), (QUERY,)),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json is missing", "Download")),
    "tokens without a row": (
        lambda folder: add_tokens(folder, "<a>", "<b>"),
        ("2 tokens more", "'<a>'", "model.resize_token_embeddings(len(tokenizer))"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", BROKEN)
def test_a_folder_that_cannot_be_played_is_refused_by_all_alike_before_it_is_loaded(folder: Path, damage: str) -> None:
    change, told = BROKEN[damage]
    change(folder)
    params = profile_params("demo")
    params["model"]["path"] = str(folder)
    for read in (
        lambda: find_shape(str(folder)),  # what `plan` reads
        lambda: check_family(params),
        lambda: (load_chat(folder), load_model(folder, compute=on_cpu(1))),
    ):
        with pytest.raises(ValueError) as error:
            read()
        assert "\n" not in str(error.value) and str(folder) in str(error.value)
        assert not [word for word in told if word not in str(error.value)], str(error.value)


WHOLE: dict[str, dict[str, torch.Tensor]] = {
    "weights in float64": {},
    "a frequency in float64": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float64)},
    "a frequency in int32": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.int32)},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WHOLE)
def test_what_transformers_casts_or_does_without_is_loaded(folder: Path, kind: str) -> None:
    file = folder / "model.safetensors"
    given = load_file(file) if WHOLE[kind] else {name: tensor.double() for name, tensor in load_file(file).items()}
    save_file({**given, **WHOLE[kind]}, file, metadata={"format": "pt"})
    assert find_shape(str(folder)) and load_model(folder, compute=on_cpu(1)).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_names_its_tensor_and_no_other_engine(folder: Path, value: float) -> None:
    set_query(folder, with_first(value))
    with pytest.raises(ValueError, match=QUERY) as error:
        load_model(folder, compute=on_cpu(1))
    assert "not finite" in str(error.value) and "vllm" not in str(error.value)


def test_log_probs_that_are_no_numbers_are_no_difference_between_engines() -> None:
    with pytest.raises(ValueError, match=r"qwen3.*no finite numbers") as error:
        refuse_what_is_not_finite([[0.0], [-1.0, float("nan")]], model="qwen3")
    assert "engine" not in str(error.value)
    refuse_what_is_not_finite([[0.0, -1e9]], model="qwen3")


def test_a_special_token_that_no_template_writes_needs_no_row(folder: Path) -> None:
    """As the one for images of Gemma 3 1B; a template that writes it makes it a token of every prompt."""
    add_tokens(folder, "<image>", is_special=True)
    load_chat(folder)
    template = folder / "chat_template.jinja"
    template.write_text("<image>" + template.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"1 token more.*'<image>'"):
        load_chat(folder)


def test_masks_and_positions_in_old_files_are_no_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    others = {"h.0.attn.bias": torch.ones(2, 2, dtype=torch.uint8), "h.0.mask": torch.ones(2, dtype=torch.bool)}
    before = count_parameters(folder)
    save_file(tensors | others | {"position_ids": torch.arange(3)}, folder / "model.safetensors")
    assert count_parameters(folder) == before + 4 + 2 + 3
    assert find_shape(str(folder)).num_layers == 2
