"""The policy as the trainer sees it: log-probs of sampled tokens from the Hugging Face model's own forward, or from C
that computes the same (`fused_forward.py`).

Logits are computed in chunks (`chunked_head.py`), only where the next token was sampled: a vocabulary of 150,000 would
fill memory. Models treat hidden states differently (Granite divides logits, Cohere multiplies, Gemma caps), so each
chunk goes through the model's own forward without its layers. Log-probs are float32, of logits in the dtype in which
the model computes them: those of the engine are rounded likewise. Shapes: B rows, T positions, D hidden, U predicting
positions, M sampled tokens, C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tasks.learning.shared.batching import MicroBatch
from tasks.learning.shared.chunked_head import Chunks, chunk_size, chunked_logp
from tasks.learning.shared.settings import Autocast
from tasks.models.fused_forward import fits, hidden_states
from tasks.models.head import with_replaced, without_layers
from tasks.models.nucleus import outside_nucleus

Distribution = tuple[float, float]  # temperature and top-p
Quantity = Literal["logp", "entropy"]
# Of a head, hidden states [C, D], positions among them and ids of the tokens that follow them: a number per token, [M].
Read = Callable[[PreTrainedModel, Tensor, Tensor, Tensor, Distribution], Tensor]


class LogProbs(torch.nn.Module):
    """`token_logp` and `token_entropy` as one module: the whole forward, which several ranks share (`sharding.py`)."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self,
        batch: MicroBatch,
        *,
        temperature: float,
        autocast: Autocast,
        top_p: float = 1.0,
        quantity: Quantity = "logp",
    ) -> Tensor:
        if quantity == "entropy":
            return token_entropy(self.model, batch, temperature=temperature, autocast=autocast)
        return token_logp(self.model, batch, temperature=temperature, top_p=top_p, autocast=autocast)


def token_logp(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    autocast: Autocast = "none",
) -> Tensor:
    """Log-prob (nats, [M], float32) of each sampled token, at the sampler's temperature and top-p.

    With `top_p` below 1 the policy is the model over the nucleus of its present weights, which has no gradient of its
    own: so the nucleus is the sampler's only until the first step (infra/decisions/0065).
    """
    return _of_sampled(model, batch, _logp, (temperature, top_p), autocast)


@torch.no_grad()
def token_entropy(
    model: PreTrainedModel, batch: MicroBatch, *, temperature: float = 1.0, autocast: Autocast = "none"
) -> Tensor:
    """Entropy (nats, [M], float32) of the whole distribution, at `temperature`, that each sampled token is one of."""
    return _of_sampled(model, batch, _entropy, (temperature, 1.0), autocast)


def _of_sampled(
    model: PreTrainedModel, batch: MicroBatch, read: Read, distribution: Distribution, autocast: Autocast
) -> Tensor:
    with _autocast(model, autocast):
        hidden_UD, kind = _hidden_and_kind(model, batch, autocast)
        head = without_layers(model, model.get_decoder(), kind)
        return _chunked(model, head, hidden_UD, batch, read, distribution, autocast)


def _hidden_and_kind(model: PreTrainedModel, batch: MicroBatch, autocast: Autocast) -> tuple[Tensor, type[Any]]:
    """The predicting positions' hidden states, [U, D], and the class of the layers' output; by C of our own where that
    computes what the model's own layers do.
    """
    tree = batch.tree
    if tree is not None and tree.plan is not None and autocast == "none" and fits(model):
        hidden_UD = hidden_states(model, batch.ids_BT, tree.position_BT, tree.plan, batch.predictor_U)
        return hidden_UD, BaseModelOutputWithPast
    output = model.get_decoder()(input_ids=batch.ids_BT, use_cache=False, **attention_inputs(batch))
    return output.last_hidden_state.flatten(0, 1)[batch.predictor_U], type(output)


def attention_inputs(batch: MicroBatch) -> dict[str, Any]:
    """Nothing for padded causal rows, else positions and a mask or plan.

    With a plan the mask is NaN: a model that does not pass the plan to its attention is noticed.
    """
    tree = batch.tree
    if tree is None:
        return {}
    if tree.plan is None:
        return {"position_ids": tree.position_BT, "attention_mask": tree.block_mask}
    nothing = torch.full((1, 1, 1, 1), float("nan"), device=batch.ids_BT.device)
    return {"position_ids": tree.position_BT, "attention_mask": nothing, "plan": tree.plan}


def _chunked(
    model: PreTrainedModel,
    head: PreTrainedModel,
    hidden_UD: Tensor,
    batch: MicroBatch,
    read: Read,
    distribution: Distribution,
    autocast: Autocast,
) -> Tensor:
    """One chunk goes through plain autograd, so that a small model's gradients do not depend on chunks."""
    size = chunk_size(head.config.get_text_config().vocab_size, hidden_UD.device)
    if len(hidden_UD) <= size:
        return read(head, hidden_UD, batch.predictor_M, batch.target_M, distribution)
    output = model.get_output_embeddings()
    path = next(name for name, module in head.named_modules() if module is output).split(".")

    def read_chunk(hidden_CD: Tensor, position: Tensor, target: Tensor, matrix: torch.nn.Module | None) -> Tensor:
        changed = head if matrix is None else with_replaced(head, path, matrix)
        with _autocast(model, autocast):
            return read(changed, hidden_CD, position, target, distribution)

    chunks = Chunks(batch.predictor_M, batch.target_M, len(hidden_UD), size)
    return chunked_logp(read_chunk, hidden_UD, chunks, output=output, parameters=_head_parameters(model, output))


def _head_parameters(model: PreTrainedModel, output: torch.nn.Module) -> list[Tensor]:
    """What is trained outside the layers; a tied output matrix too, which is the embedding inside them."""
    inside = {id(item) for item in model.get_decoder().parameters()} - {id(item) for item in output.parameters()}
    return [item for item in model.parameters() if item.requires_grad and id(item) not in inside]


def _logp(
    head: PreTrainedModel, hidden_CD: Tensor, position_M: Tensor, target_M: Tensor, distribution: Distribution
) -> Tensor:
    temperature, top_p = distribution
    logits_CV = _logits(head, hidden_CD, temperature)
    if top_p < 1:
        is_cut_CV = outside_nucleus(torch.log_softmax(logits_CV.detach(), dim=-1), top_p)
        is_cut_CV[position_M, target_M] = False  # it was sampled: only rounding can put it outside
        logits_CV = logits_CV.masked_fill(is_cut_CV, float("-inf"))
    return torch.log_softmax(logits_CV, dim=-1)[position_M, target_M]


def _entropy(
    head: PreTrainedModel, hidden_CD: Tensor, position_M: Tensor, target_M: Tensor, distribution: Distribution
) -> Tensor:
    logp_CV = torch.log_softmax(_logits(head, hidden_CD, distribution[0]), dim=-1)
    return -(logp_CV.exp() * logp_CV).sum(-1)[position_M]


def _logits(head: PreTrainedModel, hidden_CD: Tensor, temperature: float) -> Tensor:
    """In float32, [C, V]. On a CPU each pass over them costs 1% of an update, so none is made that changes nothing."""
    logits_CV = head(inputs_embeds=hidden_CD[None], use_cache=False).logits.squeeze(0).float()
    return logits_CV if temperature == 1 else logits_CV / temperature


def _autocast(model: PreTrainedModel, autocast: Autocast) -> Any:
    if autocast == "none":
        return contextlib.nullcontext()
    return torch.autocast(model.device.type, dtype=torch.bfloat16)


def prepare_for_gradients(model: PreTrainedModel) -> None:
    """No dropout in log-probs. With checkpointing transformers needs the layer itself, not its modules, in training
    mode.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # with what `prepare_torch` leaves out

    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
