"""Traces of one structure of model, shared by all engines of a process.

torch keeps every trace as long as the process lives (9 MB for three of a model of two layers), and tracing takes 0.03 s
a layer. Weights are arguments of a trace, so engines over models of one structure need one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Traced = Callable[..., tuple[Tensor, ...]]
_KNOWN: dict[tuple[str, Hashable], Traced] = {}


def trace_once(structure: str, kind: Hashable, run: Callable[..., Any], example: tuple[Tensor, ...]) -> Traced:
    """`run` over tensors as torch's C++ interpreter runs it; the first one of its structure and kind in the process."""
    if (structure, kind) not in _KNOWN:
        traced = torch.jit.trace(run, example, check_trace=False)
        # torch notes the Python function there, which has the model: a cycle that no garbage collection finds.
        vars(traced).pop("_torchdynamo_inline", None)
        _KNOWN[structure, kind] = traced
    return _KNOWN[structure, kind]


def structure_of(model: PreTrainedModel) -> str:
    """Hash of all that a trace of the model may have in it beside its tensors' values: modules and their constants, and
    each tensor's shape and dtype. Where the model came from is no part of it.
    """
    config = {**model.config.to_dict(), "attention": model.config._attn_implementation}
    digest = hashlib.sha256(repr(sorted(_constants(config).items())).encode())
    for name, module in model.named_modules():
        digest.update(repr((name, type(module), _constants(vars(module)))).encode())
    for name, tensor in model.state_dict(keep_vars=True).items():
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
    return digest.hexdigest()


def _constants(values: dict[str, Any]) -> dict[str, Any]:
    """The plain ones among the attributes of a module, and lists and tables of such (the scale of an adapter, by
    name).
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.endswith("name_or_path"):
            continue
        if isinstance(value, bool | int | float | str | torch.dtype | type(None)):
            found[name] = value
        elif isinstance(value, list | tuple):
            found[name] = _constants({str(place): item for place, item in enumerate(value)})
        elif isinstance(value, dict) and not name.startswith("_"):
            found[name] = _constants({str(key): item for key, item in value.items()})
    return found
