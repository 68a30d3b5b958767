"""torch's own AdamW or Muon, with a rate schedule and gradient clipping. State is plain tensors by name: no pickle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared.settings import OptimizerSettings


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did: the gradient's norm before clipping, the rate, and whether weights changed."""

    grad_norm: float
    learning_rate: float
    is_finite: bool


class Optimizer:
    """Steps the parameters that require a gradient. A roll-back of the sentinel lowers `rate_scale`."""

    def __init__(self, model: PreTrainedModel, settings: OptimizerSettings, *, num_steps: int):
        self.settings, self.num_steps, self.steps_done, self.rate_scale = settings, num_steps, 0, 1.0
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parts = _torch_optimizers(model, self.parameters, settings)

    def step(self, *, position: int, is_loss_finite: bool = True) -> Step:
        """Apply and clear the accumulated gradients; where loss or gradient is not finite nothing changes.

        `position` is the place in the schedule of `num_steps`; skipped steps count.
        """
        assert 0 <= position < self.num_steps, "the schedule ends with the run"
        rate = self.rate_scale * learning_rate(
            self.settings, step=self.steps_done + 1, position=position, num_steps=self.num_steps
        )
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
        for part in self.parts:
            part.state.clear()

    def tensors(self) -> dict[str, Tensor]:
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
    """AdamW for all, or Muon for the matrices inside the layers. Norms and biases do not decay."""
    matrices = _matrices(model)
    muon = {id(item) for item in matrices if settings.optimizer == "muon" and _is_inside(item, model)}
    decayed = {id(item) for item in matrices} - muon
    groups = [
        {"params": [item for item in parameters if id(item) in decayed], "weight_decay": settings.weight_decay},
        {"params": [item for item in parameters if id(item) not in decayed | muon], "weight_decay": 0.0},
    ]
    parts: list[torch.optim.Optimizer] = []
    if hidden := [item for item in parameters if id(item) in muon]:
        # Its own update is scaled to AdamW's size, so one rate serves both (Moonlight, arXiv:2502.16982).
        parts.append(
            torch.optim.Muon(hidden, lr=0.0, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    if groups := [group for group in groups if group["params"]]:
        first, second = settings.betas
        parts.append(torch.optim.AdamW(groups, lr=0.0, betas=(first, second), fused=True))
    return parts


def _matrices(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """All but norms, which are vectors, and biases, known by name: those of experts are matrices (gpt-oss)."""
    return [parameter for name, parameter in model.named_parameters() if parameter.ndim > 1 and "bias" not in name]


def _is_inside(matrix: torch.nn.Parameter, model: PreTrainedModel) -> bool:
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    return matrix.ndim == 2 and all(matrix is not end for end in ends)


def learning_rate(settings: OptimizerSettings, *, step: int, position: int, num_steps: int) -> float:
    """The rate of step number `step` (from 1) at `position` (from 0): linear warm-up times the schedule's share.

    `final_learning_rate_share` is reached only after the last position, so no step has rate 0. Warm-up counts steps
    taken, since the optimizer's averages need them; the schedule counts positions, so that it ends with the run.
    """
    warmup = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    if settings.schedule == "constant":
        return settings.learning_rate * warmup
    done, final = position / num_steps, settings.final_learning_rate_share
    remaining = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * warmup * (final + (1 - final) * remaining)
