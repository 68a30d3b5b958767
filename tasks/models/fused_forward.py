"""The layers of a small model in float32 on a CPU, with C of our own between the matrix products, forward and backward
(`native/fused_forward.c`). By torch, norms, rotations and gates are some forty operations a layer, each a pass over
memory; here they are four, and the products of one input are one product.

The Hugging Face model stays the definition: its own parameters and rotary module are used, `fits` knows the modules
that this computes and compares both once for each model. Any other model, or one that was changed (LoRA, ranks,
checkpointing, hooks), runs its own forward.

Shapes: P packed positions, U predicting ones, H hidden, I intermediate, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from tasks.models.architecture import example_ids
from tasks.models.attention import TreePlan
from tasks.models.known_modules import has_known_modules
from tasks.models.native.compiled import load_library
from tasks.models.torch_setup import is_small
from tasks.models.tree_attention import Branch

MAX_BYTES = 32 << 20  # of weights: beyond, the products take nearly all of the time
TOLERANCE = 1e-4  # of the largest hidden state
_AGREES: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
NO_MEMORY = "A layer found no memory for its sums. Lower train.micro_batch_tokens."


def fits(model: PreTrainedModel) -> bool:
    """Whether `hidden_states` computes what the model's own layers would."""
    if (
        not has_known_modules(model)
        or not is_small(model, MAX_BYTES)
        or getattr(model, "is_gradient_checkpointing", False)
        or any(map(_is_changed, model.modules()))
        or torch.is_autocast_enabled("cpu")
        or _library() is None
    ):
        return False
    if model not in _AGREES:
        _AGREES[model] = _agrees(model)
    return _AGREES[model]


def _is_changed(module: torch.nn.Module) -> bool:
    """It has a hook, a forward of its own, or dropout at work, of which the C code knows nothing."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    drops = module.training and getattr(module, "attention_dropout", 0) > 0
    return any(hooks) or "forward" in vars(module) or drops


@torch.no_grad()
def _agrees(model: PreTrainedModel) -> bool:
    """A later transformers may compute a family otherwise. Two branches after a common prefix show it."""
    path, device = np.arange(9), model.device
    plan = TreePlan([Branch(0, 6, path[:6]), Branch(6, 3, np.concatenate([path[:4], path[6:]]))], device=device)
    position = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5, 6]], device=device)
    ids = torch.tensor([example_ids(model.config, position.shape[1])], device=device)
    nothing = torch.full((1, 1, 1, 1), float("nan"), device=device)
    own = model.get_decoder()(
        input_ids=ids, position_ids=position, attention_mask=nothing, plan=plan, use_cache=False
    ).last_hidden_state[0]
    gap = (own - hidden_states(model, ids, position, plan)).abs().max()
    return bool(gap <= TOLERANCE * max(1.0, float(own.abs().max())))


def hidden_states(
    model: PreTrainedModel, ids_1P: Tensor, position_1P: Tensor, plan: TreePlan, predictor_U: Tensor | None = None
) -> Tensor:
    """What the model's layers give for a packed row, after the last norm; [P, H], or [U, H] of the positions asked for.
    Of the last layer the others need keys and values alone.
    """
    layers = model.get_decoder()
    table = layers.embed_tokens
    x = embedding(ids_1P[0], table.weight, table.padding_idx)
    cosine, sine = (tensor[0].contiguous() for tensor in layers.rotary_emb(x[None], position_1P))
    added: Tensor | None = None
    for layer in layers.layers:
        x, normed = _add_norm(x, added, layer.input_layernorm)
        attended = _attention(layer.self_attn, normed, cosine, sine, plan)
        if layer is layers.layers[-1] and predictor_U is not None:
            x, attended = (item.index_select(0, predictor_U) for item in (x, attended))
        projected = linear(attended, layer.self_attn.o_proj.weight, layer.self_attn.o_proj.bias)
        x, normed = _add_norm(x, projected, layer.post_attention_layernorm)
        added = _mlp(layer.mlp, normed)
    return _add_norm(x, added, layers.norm)[1]


def _attention(module: Any, normed: Tensor, cosine: Tensor, sine: Tensor, plan: TreePlan) -> Tensor:
    """[P, all heads' values], which the output's product follows."""
    product = _joined((module.q_proj, module.k_proj, module.v_proj), normed)
    norms = (module.q_norm, module.k_norm) if hasattr(module, "q_norm") else (None, None)
    epsilon = norms[0].variance_epsilon if norms[0] is not None else 0.0
    weights = [norm and norm.weight for norm in norms]
    query, key, value = _TurnedHeads.apply(product, *weights, cosine, sine, epsilon, module.k_proj.out_features)
    query, key, value = (item.transpose(0, 1)[None] for item in (query, key, value))
    return plan.attend(query, key, value, module.scaling)[0].flatten(1)


def _mlp(module: Any, normed: Tensor) -> Tensor:
    gated = _Gate.apply(_joined((module.gate_proj, module.up_proj), normed))
    return linear(gated, module.down_proj.weight, module.down_proj.bias)


def _joined(products: Sequence[Any], x: Tensor) -> Tensor:
    """The products of one input side by side, as one."""
    biases = [item.bias for item in products]
    bias = None if biases[0] is None else torch.cat(biases)
    return linear(x, torch.cat([item.weight for item in products]), bias)


def _add_norm(x: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """x + added, and that under the norm; both [P, H]."""
    if added is None:
        return x, _Norm.apply(x, norm.weight, norm.variance_epsilon)
    both: tuple[Tensor, Tensor] = _AddNorm.apply(x, added, norm.weight, norm.variance_epsilon)
    return both


def _norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, it under the norm, and the inverse root of each position's mean square."""
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    total = x if added is None else torch.empty_like(x)
    normed, inverse = torch.empty_like(x), x.new_empty(len(x))
    _call("add_norm", *x.shape, ctypes.c_float(epsilon), x, added, weight, total, normed, inverse)
    return total, normed, inverse


def _norm_back(saved: tuple[Tensor, ...], d_total: Tensor | None, d_normed: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the sum and of the norm's weight."""
    total, weight, inverse = saved
    d_total = None if d_total is None else d_total.contiguous()
    d_x, d_weight = torch.empty_like(total), torch.empty_like(weight)
    _call("add_norm_back", *total.shape, total, weight, inverse, d_normed.contiguous(), d_total, d_x, d_weight)
    return d_x, d_weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        total, normed, inverse = _norm(x, None, weight, epsilon)
        ctx.save_for_backward(total, weight, inverse)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_normed: Tensor) -> tuple[Tensor | None, ...]:
        return *_norm_back(ctx.saved_tensors, None, d_normed), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        total, normed, inverse = _norm(x, added, weight, epsilon)
        ctx.save_for_backward(total, weight, inverse)
        ctx.set_materialize_grads(False)  # of the last sum, which nothing reads
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_normed is None:
            return d_total, d_total, None, None
        d_x, d_weight = _norm_back(ctx.saved_tensors, d_total, d_normed)
        return d_x, d_x, d_weight, None


class _Heads(ctypes.Structure):
    _fields_ = (
        ("column", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "values", "inverse", "d_values", "d_weight")),
    )


class _Turn(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("positions", "columns", "size")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("product", "cosine", "sine", "d_product")),
        *((name, _Heads) for name in ("queries", "keys")),
    )


class _TurnedHeads(torch.autograd.Function):
    """Queries and keys under their norms, where the model has them, and rotated; values as they are. Each [P, heads,
    D]; `product` [P, of all three], `key_columns` of them keys, and as many values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        epsilon: float,
        key_columns: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        product = product.contiguous()
        num_positions, size = len(product), cosine.shape[1]
        query_columns = product.shape[1] - 2 * key_columns
        found = [product.new_empty(num_positions, columns // size, size) for columns in (query_columns, key_columns)]
        inverse = [product.new_empty(item.shape[:2]) for item in found]
        saved = (product, cosine, sine, query_weight, key_weight, *inverse)
        _turn(saved, epsilon, [{"values": item} for item in found])
        ctx.save_for_backward(*saved)
        ctx.epsilon = epsilon
        value = product[:, -key_columns:].unflatten(1, (-1, size)).contiguous()
        return found[0], found[1], value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_found: Tensor) -> tuple[Tensor | None, ...]:
        d_query, d_key, d_value = (item.contiguous() for item in d_found)
        product, _, _, *weights, _, _ = ctx.saved_tensors
        d_product = torch.empty_like(product)
        d_weights = [None if weight is None else torch.empty_like(weight) for weight in weights]
        given = zip((d_query, d_key), d_weights, strict=True)
        gradients = [{"d_values": item, "d_weight": d_weight} for item, d_weight in given]
        _turn(ctx.saved_tensors, ctx.epsilon, gradients, d_product)
        d_product[:, -d_value[0].numel() :] = d_value.flatten(1)
        return d_product, *d_weights, None, None, None, None


def _turn(
    saved: Sequence[Tensor | None],
    epsilon: float,
    tensors: Sequence[dict[str, Tensor | None]],
    d_product: Tensor | None = None,
) -> None:
    """Of queries and of keys: `tensors` by the names of the source. With `d_product` the way back."""
    product, cosine, sine, *others = saved
    assert product is not None and cosine is not None
    read = [*saved, d_product, *chain.from_iterable(given.values() for given in tensors)]
    assert all(item is None or item.dtype == torch.float32 for item in read)
    kinds, column = [], 0
    for given, weight, inverse in zip(tensors, others[:2], others[2:], strict=True):
        assert inverse is not None
        pointers = {name: _address(item) for name, item in (*given.items(), ("weight", weight), ("inverse", inverse))}
        kinds.append(_Heads(column, inverse.shape[1], **pointers))
        column += inverse.shape[1] * cosine.shape[1]
    sizes = (len(product), product.shape[1], cosine.shape[1], epsilon)
    turn = _Turn(*sizes, *map(_address, (product, cosine, sine, d_product)), *kinds)
    _call("turn_all", ctypes.byref(turn), int(d_product is not None))


class _Gate(torch.autograd.Function):
    """[P, I] from the gates and what they let through, [P, 2·I]."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        gated = both.new_empty(len(both), both.shape[1] // 2)
        _call("gate", *gated.shape, both, gated)
        return gated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gated: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        d_both = torch.empty_like(both)
        _call("gate_back", *d_gated.shape, both, d_gated.contiguous(), d_both)
        return d_both


def _call(name: str, *arguments: Any) -> None:
    """A function of the source; tensors are given by address, and would be read as floats whatever they are."""
    assert all(item.dtype == torch.float32 for item in arguments if isinstance(item, Tensor))
    given = [_address(item) if isinstance(item, Tensor) else item for item in arguments]
    given = [ctypes.c_int64(item) if type(item) is int else item for item in given]
    if getattr(_library(), name)(*given):
        raise MemoryError(NO_MEMORY)


def _address(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library("fused_forward")
    if library is not None:
        library.add_norm.restype = library.gate.restype = library.gate_back.restype = None
    return library
