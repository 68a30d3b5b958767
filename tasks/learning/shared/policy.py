"""The policy as the trainer sees it: log-probs of sampled tokens from the Hugging Face model's own forward.

Logits are computed in chunks, only where the next token was sampled: a vocabulary of 150,000 would fill memory. Models
treat hidden states differently (Granite divides logits, Cohere multiplies, Gemma caps), so each chunk goes through the
model's own forward without its layers. Shapes: B rows, T positions, D hidden, U predicting positions, M sampled tokens,
C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tasks.learning.shared.batching import MicroBatch, TreeLayout

LOGITS_AT_ONCE = 1 << 24  # elements of one chunk: 64 MB in float32

Autocast = Literal["none", "bfloat16"]


def token_logp(
    model: PreTrainedModel, batch: MicroBatch, *, temperature: float = 1.0, autocast: Autocast = "none"
) -> Tensor:
    """Log-prob (nats, [M], float32) of each sampled token, at the sampler's temperature."""
    layers = model.get_decoder()
    with _autocast(model, autocast):
        output = layers(input_ids=batch.ids_BT, use_cache=False, **attention_inputs(batch))
        hidden_UD = output.last_hidden_state.flatten(0, 1)[batch.predictor_U]
        return _chunked_logp(_without_layers(model, layers, type(output)), hidden_UD, batch, temperature)


def _without_layers(model: PreTrainedModel, layers: torch.nn.Module, output: type[Any]) -> PreTrainedModel:
    """A shallow copy of the model whose layers return their input embeddings. No tensor is copied."""

    def give_back(*_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return output(last_hidden_state=inputs_embeds)

    stand_in = copy.copy(layers)
    stand_in.forward = give_back
    path = next(name for name, module in model.named_modules() if module is layers)
    head: PreTrainedModel = _with_replaced(model, path.split("."), stand_in)
    return head


def _with_replaced(module: Any, path: list[str], replacement: torch.nn.Module) -> Any:
    if not path:
        return replacement
    first, *rest = path
    changed = copy.copy(module)
    changed._modules = {**module._modules, first: _with_replaced(module._modules[first], rest, replacement)}
    return changed


def attention_inputs(batch: MicroBatch) -> dict[str, Any]:
    """Nothing for padded causal rows, else positions and a mask or plan.

    With a plan the mask is NaN: a model that does not pass the plan to its attention is noticed.
    """
    tree = batch.tree
    if tree is None:
        return {}
    if tree.plan is None:
        return {"position_ids": tree.position_BT, "attention_mask": tree_block_mask(tree)}
    nothing = torch.full((1, 1, 1, 1), float("nan"), device=batch.ids_BT.device)
    return {"position_ids": tree.position_BT, "attention_mask": nothing, "plan": tree.plan}


def tree_block_mask(tree: TreeLayout) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    end_BT = tree.subtree_end_BT
    length = end_BT.shape[1]

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_BT[row, key])

    return create_block_mask(is_visible, 1, None, length, length, device=end_BT.device)


def _chunked_logp(head: PreTrainedModel, hidden_UD: Tensor, batch: MicroBatch, temperature: float) -> Tensor:
    """With several chunks, each chunk's logits are computed again for its gradient."""
    rows = max(1, LOGITS_AT_ONCE // head.config.get_text_config().vocab_size)
    if len(hidden_UD) <= rows:
        return _logp(head, hidden_UD, batch.predictor_M, batch.target_M, temperature)
    starts = torch.arange(0, len(hidden_UD), rows, device=hidden_UD.device)
    bounds = [*torch.searchsorted(batch.predictor_M, starts).tolist(), batch.num_tokens]
    is_training = torch.is_grad_enabled() and hidden_UD.requires_grad
    compute = partial(checkpoint, _logp, use_reentrant=False, preserve_rng_state=False) if is_training else _logp
    parts = []
    for start, first, last in zip(starts.tolist(), bounds, bounds[1:], strict=False):
        hidden_CD, position_M = hidden_UD[start : start + rows], batch.predictor_M[first:last] - start
        parts.append(compute(head, hidden_CD, position_M, batch.target_M[first:last], temperature))
    return torch.cat(parts)


def _logp(head: PreTrainedModel, hidden_CD: Tensor, position_M: Tensor, target_M: Tensor, temperature: float) -> Tensor:
    logits_CV = head(inputs_embeds=hidden_CD[None], use_cache=False).logits[0].float() / temperature
    return logits_CV[position_M, target_M] - logits_CV.logsumexp(-1)[position_M]


def _autocast(model: PreTrainedModel, autocast: Autocast) -> Any:
    if autocast == "none":
        return contextlib.nullcontext()
    return torch.autocast(model.device.type, dtype=torch.bfloat16)


def prepare_for_gradients(model: PreTrainedModel) -> None:
    """No dropout in log-probs. With checkpointing transformers needs the layer itself, not its modules, in training
    mode.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
