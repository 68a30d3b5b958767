"""LoRA adapters that turnwise saved, merged into their base model: W + scale·B·A, computed in float32.

A snapshot is merged tensor by tensor, so a model of any size needs the memory of its largest matrix. Each keeps the
dtype it has in the base's files. Source: LoRA, arXiv:2106.09685, eq. 3.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tasks.core.files import read_json
from tasks.models.files import ADAPTER, DTYPES, INDEX, loading, read_header, refuse_other_tensors, weight_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # PEFT's, before the name of a module
WEIGHT = ".weight"
# What would change a weight otherwise than by scale·B·A. `Adapter` (learning/shared/lora.py) sets none of it.
NOT_PLAIN = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")


@dataclass(frozen=True)
class LoRAUpdate:
    """What a folder's adapter adds: per module a tensor A [rank, inputs] and a B [outputs, rank]."""

    folder: Path
    tensors: Mapping[str, Tensor]
    scale: float
    targets: list[str] | str
    is_transposed: bool  # weights are [inputs, outputs], as in GPT-2

    @cached_property
    def modules(self) -> set[str]:
        return {re.sub(r"\.lora_[AB]\.weight$", "", name.removeprefix(PREFIX)) for name in self.tensors}

    def apply(self, weight: Tensor, module: str) -> Tensor:
        """The merged weight in float32, on the weight's device."""
        a, b = (self.tensors[key].to(weight.device).float() for key in _keys(module))
        change = b @ a
        return weight.float() + (change.T if self.is_transposed else change) * self.scale

    def refuse_other_modules(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """ValueError where the adapter is not one of a model whose weights have these `shapes` by module."""
        expected = {key for module in shapes if self._is_target(module) for key in _keys(module)}
        found = {
            "missing_keys": expected - self.tensors.keys(),
            "mismatched_keys": [],
            "unexpected_keys": self.tensors.keys() - expected,
        }
        refuse_other_tensors(self.folder, found)
        wrong = [module for module in self.modules if self._shape(module) != list(shapes[module])]
        keys = [key for module in wrong for key in _keys(module)]
        refuse_other_tensors(self.folder, {"missing_keys": [], "mismatched_keys": keys, "unexpected_keys": []})

    def _is_target(self, module: str) -> bool:
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.targets)

    def _shape(self, module: str) -> list[int]:
        a, b = (self.tensors[key] for key in _keys(module))
        shape = [b.shape[0], a.shape[1]]
        return shape[::-1] if self.is_transposed else shape


def read_update(folder: Path) -> LoRAUpdate:
    from safetensors.torch import load_file

    with loading(folder, "its LoRA adapter"):
        config, tensors = dict(read_json(folder / CONFIG)), load_file(folder / ADAPTER)
        odd = [name for name in NOT_PLAIN if config.get(name)]
        if odd or config.get("bias", "none") != "none":
            raise ValueError(f"{CONFIG} sets {', '.join(odd or ['bias'])}, which is more than scale·B·A")
        scale = config.get("lora_alpha", 0) / (config.get("r") or 1)
        targets, is_transposed = config.get("target_modules") or [], bool(config.get("fan_in_fan_out"))
        return LoRAUpdate(folder, tensors, scale, targets, is_transposed)


def _keys(module: str) -> tuple[str, str]:
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def merge_into(model: PreTrainedModel, update: LoRAUpdate, *, dtype: torch.dtype) -> None:
    """In place. Each merged weight is rounded to `dtype`, that of the base's files: so the model that plays is the one
    that a merged snapshot contains.
    """
    import torch

    weights = {
        name.removesuffix(WEIGHT): parameter
        for name, parameter in model.named_parameters()
        if name.endswith(WEIGHT) and parameter.ndim == 2
    }
    update.refuse_other_modules({name: weight.shape for name, weight in weights.items()})
    with torch.no_grad():
        for module in update.modules:
            weights[module].copy_(update.apply(weights[module], module).to(dtype))


def merge_files(base: Path, updates: Sequence[LoRAUpdate], target: Path) -> bool:
    """Write the weight files of `base` to `target` with `updates` merged in, one tensor in memory at a time; False, and
    nothing written, where the files name the weights otherwise than the model does.
    """
    files = weight_files(base, is_adapter=False)
    modules = modules_in(files)
    if any(update.modules - modules.keys() for update in updates):
        return False
    for update in updates:
        update.refuse_other_modules(modules)
    for file in files:
        with loading(base, "its model"):
            _merge_file(file, target / file.name, updates)
    if (base / INDEX).exists():
        shutil.copyfile(base / INDEX, target / INDEX)
    return True


def _merge_file(source: Path, target: Path, updates: Sequence[LoRAUpdate]) -> None:
    """The same header, since names, dtypes and shapes stay, then each tensor's bytes in their order. The format:
    https://github.com/huggingface/safetensors#format; reading the names has checked the header.
    """
    with source.open("rb") as original, target.open("wb") as merged:
        length = original.read(8)
        header = original.read(int.from_bytes(length, "little"))
        merged.write(length + header)
        tensors = {name: item for name, item in json.loads(header).items() if name != "__metadata__"}
        for name, item in sorted(tensors.items(), key=lambda named: tuple(named[1]["data_offsets"])):
            start, end = item["data_offsets"]
            module = name.removesuffix(WEIGHT) if name.endswith(WEIGHT) else ""
            changes = [update for update in updates if module in update.modules]
            if changes:
                data = bytearray(end - start)
                original.readinto(data)
                merged.write(_merge_tensor(data, item, module, changes))
            else:
                _copy_bytes(original, merged, end - start)


def _merge_tensor(data: bytearray, item: Mapping[str, Any], module: str, updates: Sequence[LoRAUpdate]) -> memoryview:
    import torch

    if item["dtype"] not in DTYPES:
        raise ValueError(f"{module} is {item['dtype']}, to which nothing can be added")
    dtype = getattr(torch, DTYPES[item["dtype"]])
    tensor = torch.frombuffer(data, dtype=dtype).view(item["shape"])
    for update in updates:
        tensor = update.apply(tensor, module).to(dtype)
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _copy_bytes(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count:
        data = source.read(min(count, 1 << 20))
        if not data:
            raise ValueError("it ends within a tensor")
        target.write(data)
        count -= len(data)


def modules_in(files: Sequence[Path]) -> dict[str, list[int]]:
    shapes = {name: shape for file in files for name, _, shape in read_header(file)}
    return {
        name.removesuffix(WEIGHT): shape for name, shape in shapes.items() if name.endswith(WEIGHT) and len(shape) == 2
    }
