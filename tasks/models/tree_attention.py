"""Attention of packed trees on a CPU by C of our own (`native/tree_attention.c`), forward and backward.

torch's kernel computes rectangles of queries by keys, so branches are padded, masked and sorted into many small calls.
Ours goes along each branch's own path, and computes little else than the pairs that see each other.

Shapes: K key-value heads, G query heads per key-value head, P packed positions, D head size, B branches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tasks.models.native.compiled import load_library

LARGEST_GROUP = 32  # query heads per key-value head: ROWS of the source


@dataclass(frozen=True, slots=True)
class Branch:
    """New positions from packed index `start`; `path` is the packed index of every position from the root to their
    end.
    """

    start: int
    num_new: int
    path: np.ndarray


class BranchTable:
    """All branches of a packed row as the source reads them, made once per row: `branches` [B, 4] contains start,
    number of new positions, and where in `paths` its path begins and how long it is.
    """

    def __init__(self, branches: Sequence[Branch]):
        lengths = np.asarray([len(branch.path) for branch in branches], np.int64)
        new = [(branch.start, branch.num_new) for branch in branches]
        self.paths = np.concatenate([branch.path for branch in branches]).astype(np.int64, copy=False)
        self.branches = np.column_stack([np.asarray(new, np.int64), np.cumsum(lengths) - lengths, lengths])
        self.num_positions = int(self.branches[:, 1].sum())
        self.longest = int(lengths.max())


class _Heads(ctypes.Structure):
    """A tensor of heads: its address, and the steps from head to head and from position to position, in floats."""

    _fields_ = (("data", ctypes.c_void_p), ("head", ctypes.c_int64), ("position", ctypes.c_int64))


SIZES = ("num_keys", "group", "key_size", "value_size", "num_positions", "num_branches", "longest")


class _Attention(ctypes.Structure):
    """`Attention` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_void_p) for name in ("branches", "paths")),
        *((name, _Heads) for name in ("query", "key", "value", "output")),
        ("log_sums", ctypes.c_void_p),
        *((name, _Heads) for name in ("d_output", "d_query", "d_key", "d_value")),
        ("scale", ctypes.c_float),
    )


def native_library() -> ctypes.CDLL | None:
    return load_library("tree_attention")


def is_native(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_natively` computes these; the rest is torch's. It has at most a thread for each key-value head,
    and is 1.3 to 2.3 times as fast as torch with as many: where torch has more than twice that, torch attends.
    """
    is_plain = all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in (query, key, value))
    fits = query.shape[1] <= LARGEST_GROUP * key.shape[1] and torch.get_num_threads() <= 2 * key.shape[1]
    return is_plain and fits and native_library() is not None


def attend_natively(query: Tensor, key: Tensor, value: Tensor, scaling: float, table: BranchTable) -> Tensor:
    """query [1, K·G, P, D], key [1, K, P, D], value [1, K, P, its own D]; returns [1, P, K·G, D of values]."""
    output: Tensor = _TreeAttention.apply(query, key, value, scaling, table)
    return output


class _TreeAttention(torch.autograd.Function):
    """Saves the log of each softmax's sum, and computes the scores again on the way back: written out, they would be as
    many as pairs and heads.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, table: BranchTable) -> Tensor:
        query, key, value = (_with_close_floats(tensor) for tensor in (query, key, value))
        num_heads, length = query.shape[1:3]
        output = query.new_empty(1, length, num_heads, value.shape[3])
        log_sums = query.new_empty(num_heads, length)
        found = {"query": query, "key": key, "value": value, "output": output.transpose(1, 2)}
        _call(table, scaling, log_sums, found, is_backward=False)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.scaling, ctx.table = scaling, table
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        # As the model's own tensors are: the heads of a position side by side. Keys and values are added to.
        d_query = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        d_key, d_value = (
            torch.zeros_like(tensor.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            for tensor in (key, value)
        )
        found = {
            "query": query, "key": key, "value": value, "output": output.transpose(1, 2),
            "d_output": _with_close_floats(d_output).transpose(1, 2),
            "d_query": d_query, "d_key": d_key, "d_value": d_value,
        }  # fmt: skip
        _call(ctx.table, ctx.scaling, log_sums, found, is_backward=True)
        wanted = zip((d_query, d_key, d_value), ctx.needs_input_grad, strict=False)
        return *(gradient if is_wanted else None for gradient, is_wanted in wanted), None, None


def _with_close_floats(tensor: Tensor) -> Tensor:
    """The source reads the numbers of one head and position side by side; heads and positions may be anywhere."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _call(
    table: BranchTable, scaling: float, log_sums: Tensor, tensors: dict[str, Tensor], *, is_backward: bool
) -> None:
    """`tensors` [1, heads, P, D] by the names of the source; it writes output and log_sums, or adds up gradients."""
    library = native_library()
    assert library is not None
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    num_keys, num_positions = key.shape[1:3]
    assert num_positions == table.num_positions, "another row than the plan's"
    given = _Attention(
        num_keys=num_keys,
        group=query.shape[1] // num_keys,
        key_size=key.shape[3],
        value_size=value.shape[3],
        num_positions=num_positions,
        num_branches=len(table.branches),
        longest=table.longest,
        branches=table.branches.ctypes.data,
        paths=table.paths.ctypes.data,
        log_sums=log_sums.data_ptr(),
        scale=scaling,
        **{name: _Heads(item.data_ptr(), item.stride(1), item.stride(2)) for name, item in tensors.items()},
    )
    if library.attend(ctypes.byref(given), int(is_backward), torch.get_num_threads()):
        raise MemoryError("Attention found no memory for the keys of one path. Lower train.micro_batch_tokens.")
