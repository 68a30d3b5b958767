"""The policy as the trainer sees it: log-probs of sampled tokens, an optimizer, and a frozen copy as reference.

The forward is the Hugging Face model's own. Logits are computed only at positions whose next token was sampled.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.batching import MicroBatch
from tasks.learning.options import OptimizerSettings


def token_logp(model: PreTrainedModel, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
    """Log-prob (nats, [M]) of each sampled token given everything before it in its row, logits over `temperature`.

    The temperature is the sampler's, so that a ratio to its log-probs compares like with like.
    """
    hidden_BTD = model.base_model(input_ids=batch.ids_BT[:, :-1], use_cache=False).last_hidden_state
    logits_MV = model.get_output_embeddings()(hidden_BTD[batch.selected_BT])
    return -torch.nn.functional.cross_entropy(logits_MV.float() / temperature, batch.target_M, reduction="none")


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The reference: the policy as it is now, without gradients."""
    return copy.deepcopy(model).requires_grad_(False).eval()


class Optimizer:
    """AdamW with warm-up, linear decay and gradient clipping, counted in optimizer steps."""

    def __init__(self, model: PreTrainedModel, settings: OptimizerSettings, *, num_steps: int):
        self.settings, self.num_steps, self.steps_done = settings, num_steps, 0
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        first, second = settings.betas
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=0.0, betas=(first, second), weight_decay=settings.weight_decay, fused=True
        )

    def step(self) -> tuple[float, float]:
        """Apply the accumulated gradients and clear them; (gradient norm before clipping, learning rate)."""
        rate = learning_rate(self.settings, step=self.steps_done + 1, num_steps=self.num_steps)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            raise ValueError(
                f"the gradient at optimizer step {self.steps_done + 1} is not finite ({norm}), so the weights would "
                f"be lost. Nothing was changed; lower learning_rate, or look at the last rollouts for runaway text."
            )
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.steps_done += 1
        return norm, rate


def learning_rate(settings: OptimizerSettings, *, step: int, num_steps: int) -> float:
    """The rate of optimizer step 1…num_steps: linear warm-up times linear decay to `final_learning_rate_share`."""
    warmup = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    decay = 1 - (1 - settings.final_learning_rate_share) * step / num_steps
    return settings.learning_rate * warmup * decay
