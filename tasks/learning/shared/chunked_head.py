"""Log-probs of sampled tokens from hidden states, a chunk of positions at a time, for vocabularies whose logits do not
fit in memory.

Backward computes each chunk's logits again and adds the gradient of the output matrix in place to one float32 buffer:
autograd would allocate one of the vocabulary's size per chunk. What the model does before and after that matrix
(Granite divides, Cohere multiplies, Gemma caps) goes through its own forward and autograd. Shapes: U predicting
positions, M sampled tokens, C positions of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Bytes of a chunk's logits in float32; backward holds about five times that. On a GPU fewer and larger matrix products
# are faster, and each chunk adds to the whole buffer.
LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}

# Of hidden states [C, D], with the output matrix replaced by the module where one is given: log-probs [m] of the tokens
# `target` after the positions `position` of the chunk.
Head = Callable[[Tensor, Tensor, Tensor, torch.nn.Module | None], Tensor]


@dataclass(frozen=True, slots=True)
class Chunks:
    """`position_M` ascends and points into the U positions, which are cut every `size`."""

    position_M: Tensor
    target_M: Tensor
    num_positions: int
    size: int

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """The slices of positions and of tokens, then the tokens' positions in the chunk and their ids."""
        starts = list(range(0, self.num_positions, self.size))
        edges = torch.tensor(starts, device=self.position_M.device)
        bounds = [*torch.searchsorted(self.position_M, edges).tolist(), len(self.position_M)]
        for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
            tokens = slice(first, last)
            yield slice(start, start + self.size), tokens, self.position_M[tokens] - start, self.target_M[tokens]


def chunk_size(vocabulary: int, device: torch.device) -> int:
    return max(1, LOGIT_BYTES[device.type] // (4 * vocabulary))


def chunked_logp(
    head: Head, hidden_UD: Tensor, chunks: Chunks, *, output: torch.nn.Module, parameters: Sequence[Tensor]
) -> Tensor:
    """[M], float32. `output` is the module with the output matrix, `parameters` are what of the head is trained."""
    if not torch.is_grad_enabled() or not (parameters or hidden_UD.requires_grad):
        return _compute(head, hidden_UD, chunks)
    logp_M: Tensor = _Chunked.apply(head, chunks, output, hidden_UD, *parameters)
    return logp_M


def _compute(head: Head, hidden_UD: Tensor, chunks: Chunks) -> Tensor:
    return torch.cat([head(hidden_UD[at], position, target, None) for at, _, position, target in chunks])


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: Head, chunks: Chunks, output: torch.nn.Module, hidden_UD: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.head, ctx.chunks, ctx.output = head, chunks, output
        ctx.save_for_backward(hidden_UD, *parameters)
        return _compute(head, hidden_UD, chunks)

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_UD, *parameters = ctx.saved_tensors
        sums = {id(item): torch.zeros_like(item, dtype=torch.float32) for item in parameters}
        matrix = _replace(ctx.output, sums)
        rest = [item for item in parameters if matrix is None or item is not matrix.weight]
        grad_UD = torch.empty_like(hidden_UD)
        for at, tokens, position, target in ctx.chunks:
            with torch.enable_grad():
                hidden_CD = hidden_UD[at].detach().requires_grad_()
                logp = ctx.head(hidden_CD, position, target, matrix)
            grads = torch.autograd.grad(logp, [hidden_CD, *rest], grad_M[tokens], materialize_grads=True)
            grad_UD[at] = grads[0]
            for item, grad in zip(rest, grads[1:], strict=True):
                sums[id(item)].add_(grad)
        return None, None, None, grad_UD, *(sums[id(item)].to(item.dtype) for item in parameters)


def _replace(output: torch.nn.Module, sums: dict[int, Tensor]) -> _Matrix | None:
    """None where the weight is frozen, or `output` is more than a matrix and a bias: then autograd makes the
    gradients.
    """
    if type(output) is not torch.nn.Linear or id(output.weight) not in sums:
        return None
    return _Matrix(output, sums[id(output.weight)])


class _Matrix(torch.nn.Module):
    """A linear layer whose weight's gradient is added to `sum_VD`. Under autocast the weight is cast once, for all
    chunks.
    """

    def __init__(self, output: torch.nn.Linear, sum_VD: Tensor):
        super().__init__()
        self.weight, self.bias, self.sum_VD = output.weight, output.bias, sum_VD
        self.cast: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        if self.cast is None:
            self.cast = self.weight.detach().to(dtype)
        with torch.autocast(device, enabled=False):
            logits: Tensor = _AddedLinear.apply(hidden.to(dtype), self.cast, self.sum_VD)
            return logits if self.bias is None else logits + self.bias.to(dtype)


class _AddedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_VD: Tensor, sum_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight_VD)
        ctx.sum_VD = sum_VD
        return torch.nn.functional.linear(hidden, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        hidden, weight_VD = ctx.saved_tensors
        grad_CV, hidden_CD = grad.flatten(0, -2), hidden.flatten(0, -2)
        if hidden.dtype == ctx.sum_VD.dtype:
            ctx.sum_VD.addmm_(grad_CV.T, hidden_CD)
        else:
            ctx.sum_VD.add_(grad_CV.T @ hidden_CD)
        return grad @ weight_VD, None, None
