"""The optimizer: torch's own AdamW or Muon, a rate schedule and gradient clipping, counted in optimizer steps.

Its state is plain tensors by name, so that a checkpoint needs no pickle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.options import OptimizerSettings


@dataclass(frozen=True, slots=True)
class Step:
    """What an optimizer step did: the gradient's norm before clipping, the rate, and whether weights were changed."""

    grad_norm: float
    learning_rate: float
    is_finite: bool


class Optimizer:
    """Steps the parameters that require a gradient. `rate_scale` is what a roll-back of the sentinel lowers."""

    def __init__(self, model: PreTrainedModel, settings: OptimizerSettings, *, num_steps: int):
        self.settings, self.num_steps, self.steps_done, self.rate_scale = settings, num_steps, 0, 1.0
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parts = _torch_optimizers(model, self.parameters, settings)

    def step(self, *, is_loss_finite: bool = True) -> Step:
        """Apply the accumulated gradients and clear them. Where loss or gradient is not finite nothing is changed."""
        rate = self.rate_scale * learning_rate(self.settings, step=self.steps_done + 1, num_steps=self.num_steps)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm))
        is_finite = math.isfinite(norm) and is_loss_finite
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            if is_finite:
                part.step()
            part.zero_grad(set_to_none=True)
        self.steps_done += 1
        return Step(norm, rate, is_finite)

    def forget_moments(self) -> None:
        """Start the running averages anew, as after weights were put back: they point where weights no longer go."""
        for part in self.parts:
            part.state.clear()

    def tensors(self) -> dict[str, Tensor]:
        """The running averages, by optimizer, parameter and name."""
        return {
            f"{number}.{index}.{name}": value
            for number, part in enumerate(self.parts)
            for index, values in part.state_dict()["state"].items()
            for name, value in values.items()
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        for number, part in enumerate(self.parts):
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                owner, index, name = key.split(".")
                if int(owner) == number:
                    state.setdefault(int(index), {})[name] = value
            part.load_state_dict({**part.state_dict(), "state": state})


def _torch_optimizers(
    model: PreTrainedModel, parameters: list[torch.nn.Parameter], settings: OptimizerSettings
) -> list[torch.optim.Optimizer]:
    """AdamW for all; or Muon for the matrices inside the layers and AdamW for the rest, as its authors advise."""
    matrices = [item for item in parameters if settings.optimizer == "muon" and _is_hidden_matrix(item, model)]
    ours = {id(item) for item in matrices}
    others = [item for item in parameters if id(item) not in ours]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        # Its own update is scaled to AdamW's size, so one rate serves both (Moonlight, arXiv:2502.16982).
        parts.append(
            torch.optim.Muon(matrices, lr=0.0, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    if others:
        first, second = settings.betas
        parts.append(
            torch.optim.AdamW(others, lr=0.0, betas=(first, second), weight_decay=settings.weight_decay, fused=True)
        )
    return parts


def _is_hidden_matrix(parameter: torch.nn.Parameter, model: PreTrainedModel) -> bool:
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    return parameter.ndim == 2 and all(parameter is not end for end in ends)


def learning_rate(settings: OptimizerSettings, *, step: int, num_steps: int) -> float:
    """The rate of optimizer step 1…num_steps: linear warm-up times the schedule's share of the peak.

    linear falls to `final_learning_rate_share` in a straight line, cosine along half a wave, constant not at all.
    """
    warmup = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    done = step / num_steps
    remaining = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]
    share = settings.final_learning_rate_share
    return (
        settings.learning_rate * warmup * (1.0 if settings.schedule == "constant" else share + (1 - share) * remaining)
    )
