"""The attention function with which engine and trainer run a Hugging Face model (transformers' own extension point),
and the plans for packed trees (training) and packed steps (generation).

Shapes: N rows, K key-value heads, G query heads per key-value head, T positions, D head size, Q query length, P packed
positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tasks.models.scored_attention import FUSED, Kernel, attend_in_blocks, choose_kernel
from tasks.models.tree_attention import Branch, BranchTable, attend_natively, is_native

ATTENTION = "turnwise"
# No effect here: a window is in transformers' mask (plans are for models without, see architecture.py), and the rest
# concerns the model around the attention.
HARMLESS_KEYWORDS = {
    "sliding_window", "position_ids", "cache_position", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits",
}  # fmt: skip
MOST_GRAPHS = 64  # of FlexAttention
PADDING_FACTOR = 1.25  # branches whose lengths differ by less share a call


class UnknownAttention(ValueError):
    """A model asks its attention for something that ours does not compute."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One kernel call over S branches: query [S, Q], key [S, T], mask [S, 1, Q, T], or None where causal without
    prefix.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None


class TreePlan:
    """Each branch attends to its own path only. A dense mask would cost the square of the row's length.

    In float32 on a CPU C of our own computes it, where it can be compiled (`tree_attention.py`); torch's kernel does in
    all other cases.
    """

    def __init__(self, branches: Sequence[Branch], *, device: torch.device):
        self.table = BranchTable(branches)
        self._branches, self._device = branches, device

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel = FUSED) -> Tensor:
        """query [1, K·G, T, D], key and value [1, K, T, D] of the packed row; returns [1, T, K·G, D]."""
        if kernel is FUSED and is_native(query, key, value):
            return attend_natively(query, key, value, scaling, self.table)
        return self._in_calls(query, key, value, scaling, kernel)

    def _in_calls(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        calls, output = self._calls
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        outputs = []
        for call in calls:
            result = kernel(
                query[call.query].transpose(1, 2),
                key[call.key].transpose(1, 2),
                value[call.key].transpose(1, 2),
                attn_mask=None if call.mask is None else call.mask.to(query.dtype),
                is_causal=call.mask is None,
                scale=scaling,
                enable_gqa=True,
            )
            outputs.append(result.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[output][None]

    @cached_property
    def _calls(self) -> tuple[list[_Call], Tensor]:
        """Calls over branches of similar size, and where in their results each packed position is."""
        calls = []
        output, offset = np.empty(self.table.num_positions, np.int64), 0
        for bucket in _alike(self._branches):
            width, length = max(item.num_new for item in bucket), max(len(item.path) for item in bucket)
            query, key = np.zeros((len(bucket), width), np.int64), np.zeros((len(bucket), length), np.int64)
            prefix = np.empty(len(bucket), np.int64)
            for row, branch in enumerate(bucket):
                new = np.arange(branch.start, branch.start + branch.num_new)
                query[row, : branch.num_new], key[row, : len(branch.path)] = new, branch.path
                prefix[row] = len(branch.path) - branch.num_new
                output[new] = offset + row * width + np.arange(branch.num_new)
            offset += query.size
            device = self._device
            mask = _branch_mask(torch.from_numpy(prefix).to(device), width, length) if prefix.any() else None
            calls.append(_Call(torch.from_numpy(query).to(device), torch.from_numpy(key).to(device), mask))
        return calls, torch.from_numpy(output).to(self._device)


def _alike(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Buckets of similar size, roots apart from branches with a prefix: a bucket is padded to its longest."""
    buckets: list[list[Branch]] = []
    order = sorted(branches, key=lambda item: (len(item.path) > item.num_new, item.num_new, len(item.path)))
    for branch in order:
        first = buckets[-1][0] if buckets else None
        if (
            first is None
            or (len(first.path) > first.num_new) != (len(branch.path) > branch.num_new)
            or branch.num_new > PADDING_FACTOR * first.num_new
            or not 1 / PADDING_FACTOR < len(branch.path) / len(first.path) < PADDING_FACTOR
        ):
            buckets.append([])
        buckets[-1].append(branch)
    return buckets


def _branch_mask(prefix_S: Tensor, width: int, length: int) -> Tensor:
    """0 where query q of a branch sees position t of its path, t ≤ prefix + q, and −inf elsewhere; [S, 1, Q, T]."""
    query = torch.arange(width, device=prefix_S.device)
    position = torch.arange(length, device=prefix_S.device)
    is_hidden = position[None, None, :] > prefix_S[:, None, None] + query[None, :, None]
    return torch.zeros(is_hidden.shape, device=prefix_S.device).masked_fill_(is_hidden, float("-inf"))[:, None]


class StepPlan:
    """How a packed generation step attends to a cache of rows: first A appends, each padded to W positions, then the
    last position of every row.

    `place_N` and `place_AW` are the places of last and of appended positions in their rows, `append_A` the row of each
    append; either kind may be missing. `span_T` counts the cache's positions. All sizes come from these tensors, so a
    plan can be traced. Last positions use two batched matrix products over the cache's views: transformers' sdpa path
    copies each key and value G times first, which at decode costs more than the arithmetic. Appends use torch's SDPA
    over a copy of their rows. On a GPU and in 16 bits both are torch's SDPA with the heads of a key as queries or batch
    (`_fold_heads`): scores stay in float32, and no kernel with a mask takes grouped heads there without writing out
    all scores.
    """

    def __init__(
        self,
        span_T: Tensor,
        *,
        place_N: Tensor | None,
        place_AW: Tensor | None,
        append_A: Tensor | None,
        dtype: torch.dtype,
    ):
        self.append_A = append_A
        self.last_bias = None if place_N is None else _hidden_beyond(place_N[:, None], span_T, dtype)[:, None]
        self.append_bias = None if place_AW is None else _hidden_beyond(place_AW, span_T, dtype)[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel = FUSED) -> Tensor:
        """query [1, K·G, P, D], key and value [N, K, T, D] of the cache's rows; returns [1, P, K·G, D]."""
        query = query[0].transpose(0, 1)
        if self.append_bias is None:
            return self._last(query, key, value, scaling, kernel)[None]
        num_appends, _, width, _ = self.append_bias.shape
        end = num_appends * width
        output = self._appends(query[:end].view(num_appends, width, *query.shape[1:]), key, value, scaling, kernel)
        if self.last_bias is not None:
            output = torch.cat([output, self._last(query[end:], key, value, scaling, kernel)])
        return output[None]

    def _appends(self, query_AWHD: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        assert self.append_A is not None
        query = query_AWHD.transpose(1, 2)
        key, value = (tensor.index_select(0, self.append_A) for tensor in (key, value))
        if kernel is FUSED and query.is_cuda:
            result = _fold_heads(query, key, value, self.append_bias, scaling)
        else:
            result = kernel(query, key, value, attn_mask=self.append_bias, scale=scaling, enable_gqa=True)
        return result.transpose(1, 2).flatten(0, 1)

    def _last(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel) -> Tensor:
        if kernel is not FUSED:
            mask, positions = self.last_bias, query[:, :, None]
            return kernel(positions, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)[:, :, 0]
        grouped = query.unflatten(1, (key.shape[1], -1))
        if query.is_cuda or query.dtype != torch.float32:
            return FUSED(grouped, key, value, attn_mask=self.last_bias, scale=scaling).flatten(1, 2)
        scores = torch.matmul(grouped, key.transpose(-1, -2)).mul_(scaling).add_(self.last_bias)
        return torch.matmul(scores.softmax(-1), value).flatten(1, 2)


class PromptPlan:
    """Causal attention of prompts side by side. Without a mask it can be traced; transformers would make one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: Kernel = FUSED) -> Tensor:
        """query [N, K·G, T, D], key and value [N, K, T, D]; returns [N, T, K·G, D]."""
        return _attend_whole(kernel, query, key, value, None, scaling).transpose(1, 2)


def _attend_whole(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """A kernel over whole rows, causal where there is no mask; query [N, K·G, Q, D], key and value [N, K, T, D]."""
    is_grouped = True
    if kernel is FUSED and query.is_cuda and (query.dtype == torch.float32 or mask is not None):
        # The flash kernel takes neither, and the memory-efficient one no grouped heads: torch would write T × T scores.
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        is_grouped = False
    return kernel(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped)


def _fold_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of query [A, K·G, W, D] over key and value [A, K, T, D], each key's heads in the batch; as query."""
    num_keys = key.shape[1]
    group = query.shape[1] // num_keys
    key, value = (tensor.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for tensor in (key, value))
    mask = None if mask is None else mask.repeat_interleave(num_keys, 0)
    result = FUSED(query.unflatten(1, (num_keys, group)).flatten(0, 1), key, value, attn_mask=mask, scale=scaling)
    return result.unflatten(0, (-1, num_keys)).flatten(1, 2)


def _hidden_beyond(place_NQ: Tensor, span_T: Tensor, dtype: torch.dtype) -> Tensor:
    """0 up to each query's own place and −inf beyond; [N, Q, T]."""
    is_hidden = span_T > place_NQ[..., None]
    return torch.zeros_like(is_hidden, dtype=dtype).masked_fill_(is_hidden, float("-inf"))


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    plan: TreePlan | StepPlan | PromptPlan | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over grouped heads without repeating keys and values; query [N, K·G, Q, D], key and value [N, K, T, D].

    A plan, where given, computes it; packed trees on CUDA have a BlockMask. All else is torch's own kernel, causal
    where there is no mask ([N, 1, Q, T]). A soft cap and sinks (`s_aux`) have a kernel of our own. UnknownAttention for
    any other keyword: ignored, it would be another model.
    """
    _refuse_unknown(module, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if plan is not None:
        return plan.attend(query, key, value, scaling, choose_kernel(softcap=softcap, sinks_H=s_aux)), None
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        output = attend_in_blocks(
            _flex_attention(), query, key, value, block_mask=attention_mask, scale=scaling, softcap=softcap,
            sinks_H=s_aux,
        )  # fmt: skip
        return output.transpose(1, 2), None
    kernel = choose_kernel(softcap=softcap, sinks_H=s_aux)
    return _attend_whole(kernel, query, key, value, attention_mask, scaling).transpose(1, 2), None


def _refuse_unknown(module: torch.nn.Module, keywords: dict[str, Any]) -> None:
    for name, value in keywords.items():
        is_plain = name in HARMLESS_KEYWORDS or value is None or (name == "is_causal" and value is True)
        if not is_plain and not (name == "dropout" and value == 0):
            raise UnknownAttention(
                f"{type(module).__name__} asks its attention for {name}, which turnwise's does not compute, so "
                f"its log-probs would be wrong. Use a model of another architecture."
            )


@cache
def _flex_attention() -> Any:
    """Compiled for each of: gradients or none, each dtype, autocast, one position, up to 128, more. Dynamo compiles 8
    by default, and what comes then would have all scores in memory; with `fullgraph` it is an error instead.
    """
    import torch._dynamo.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def register_attention() -> None:
    AttentionInterface.register(ATTENTION, grouped_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextmanager
def refuse_fixed_attention(folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """ValueError where transformers lets no attention but its own into the model that is made inside."""
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        raise ValueError(
            f"{folder}: transformers lets no other attention into {config['model_type']} models, so turnwise can "
            f"neither play nor train one. Use a model of another architecture."
        ) from None
