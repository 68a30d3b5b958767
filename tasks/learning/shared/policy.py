"""The policy as the trainer sees it: log-probs of sampled tokens from the Hugging Face model's own forward.

Logits are computed only at positions whose next token was sampled, and in chunks, so that a vocabulary of 150,000 does
not dominate memory. What becomes of hidden states is the model's business (Granite divides logits, Cohere multiplies
them, Gemma caps them): each chunk goes through the model's own forward with its layers left out. Shapes: B rows, T
positions, D hidden, U predicting positions, M sampled tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
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
    """Log-prob (nats, [M], float32) of each sampled token given everything before it, logits over `temperature`.

    The temperature is the sampler's, so that a ratio to its log-probs compares like with like.
    """
    layers = model.get_decoder()
    with _autocast(model, autocast):
        output = layers(input_ids=batch.ids_BT, use_cache=False, **attention_inputs(batch))
        hidden_UD = output.last_hidden_state.flatten(0, 1)[batch.predictor_U]
        return _chunked_logp(_without_layers(model, layers, type(output)), hidden_UD, batch, temperature)


def _without_layers(model: PreTrainedModel, layers: torch.nn.Module, output: type[Any]) -> PreTrainedModel:
    """The model with its own weights, whose layers give back the hidden states that they are handed as embeddings, as
    an `output` of their kind. The model itself is left alone: what is copied is a few objects and no tensor.
    """

    def give_back(*_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return output(last_hidden_state=inputs_embeds)

    stand_in = copy.copy(layers)
    stand_in.forward = give_back
    path = next(name for name, module in model.named_modules() if module is layers)
    head: PreTrainedModel = _with_replaced(model, path.split("."), stand_in)
    return head


def _with_replaced(module: Any, path: list[str], replacement: torch.nn.Module) -> Any:
    """A copy of `module` that has the replacement at `path`, and everything else in common with it."""
    if not path:
        return replacement
    twin = copy.copy(module)
    first, *rest = path
    twin._modules = {**module._modules, first: _with_replaced(module._modules[first], rest, replacement)}
    return twin


def attention_inputs(batch: MicroBatch) -> dict[str, Any]:
    """What tells the model who attends to whom: nothing for padded causal rows, else positions and a mask or plan.

    With a plan, the mask is a NaN: a model that does not hand the plan on to its attention must not go unnoticed.
    """
    if batch.tree is None:
        return {}
    tree = batch.tree
    if tree.plan is None:
        return {"position_ids": tree.position_BT, "attention_mask": tree_block_mask(tree)}
    nothing = torch.full((1, 1, 1, 1), float("nan"), device=batch.ids_BT.device)
    return {"position_ids": tree.position_BT, "attention_mask": nothing, "plan": tree.plan}


def tree_block_mask(tree: TreeLayout) -> Any:
    """The BlockMask of a packed row for FlexAttention, which skips every block that is masked out whole."""
    from torch.nn.attention.flex_attention import create_block_mask

    end_BT = tree.subtree_end_BT
    length = end_BT.shape[1]

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end_BT[row, key])

    return create_block_mask(is_visible, 1, None, length, length, device=end_BT.device)


def _chunked_logp(head: PreTrainedModel, hidden_UD: Tensor, batch: MicroBatch, temperature: float) -> Tensor:
    """One chunk of positions after another; with several, a chunk's logits are computed again for its gradient."""
    rows = max(1, LOGITS_AT_ONCE // head.config.get_text_config().vocab_size)
    num_positions = len(hidden_UD)
    if num_positions <= rows:
        return _logp(head, hidden_UD, batch.predictor_M, batch.target_M, temperature)
    starts = torch.arange(0, num_positions, rows, device=hidden_UD.device)
    bounds = [*torch.searchsorted(batch.predictor_M, starts).tolist(), batch.num_tokens]
    parts = []
    for number, start in enumerate(starts.tolist()):
        entries = slice(bounds[number], bounds[number + 1])
        arguments = (
            head, hidden_UD[start : start + rows], batch.predictor_M[entries] - start, batch.target_M[entries],
            temperature,
        )  # fmt: skip
        is_training = torch.is_grad_enabled() and hidden_UD.requires_grad
        parts.append(
            checkpoint(_logp, *arguments, use_reentrant=False, preserve_rng_state=False)
            if is_training
            else _logp(*arguments)
        )
    return torch.cat(parts)


def _logp(head: PreTrainedModel, hidden_CD: Tensor, position_M: Tensor, target_M: Tensor, temperature: float) -> Tensor:
    logits_CV = head(inputs_embeds=hidden_CD[None], use_cache=False).logits[0].float() / temperature
    return logits_CV[position_M, target_M] - logits_CV.logsumexp(-1)[position_M]


def _autocast(model: PreTrainedModel, autocast: Autocast) -> Any:
    if autocast == "none":
        return contextlib.nullcontext()
    return torch.autocast(model.device.type, dtype=torch.bfloat16)


def prepare_for_gradients(model: PreTrainedModel) -> None:
    """Eval mode, so that no dropout enters a log-prob or a ratio; where activations are checkpointed, each layer by
    itself is in training mode, which transformers asks of it, and nothing inside it is.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
