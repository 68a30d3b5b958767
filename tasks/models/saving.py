"""A model's weights and configs as files: as `save_pretrained` writes them, but in any dtype, a shard at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.files import write_json
from tasks.models.files import INDEX, SINGLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

MAX_SHARD_BYTES = 2 << 30  # of one file: what saving a model holds in memory beside it


def save_model(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = str(dtype).removeprefix("torch."), [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    _write_shards(folder, _tensors_to_save(model), dtype)


def _tensors_to_save(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's own tensors under the names of its published files; of tied ones, one."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    unsaved = model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in unsaved}
    return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model)))


def _write_shards(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    dtypes = {name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in tensors.items()}
    sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in tensors.items()}
    shards = _divide(sizes)
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, names in zip(files, shards, strict=True):
        _write_shard(folder / file, {name: tensors[name] for name in names}, dtypes)
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})


def _write_shard(file: Path, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """A function of its own, so that its copies are gone before the next shard's are made."""
    from safetensors.torch import save_file

    stored = {name: tensor.to("cpu", dtypes[name]).contiguous() for name, tensor in tensors.items()}
    save_file(stored, file, metadata={"format": "pt"})


def _divide(sizes: Mapping[str, int]) -> list[list[str]]:
    """The names in order, in shards of at most MAX_SHARD_BYTES; a larger tensor has one of its own."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards
