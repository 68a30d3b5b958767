"""torch's own AdamW or Muon, with a rate schedule and gradient clipping. State is plain tensors by name: no pickle.

A parameter that is not float32 has a float32 master: a step of 1e-5 is lost in bfloat16, whose numbers near 1 are 0.008
apart. Gradients are added up on the masters in float32, micro-batch by micro-batch; the step moves the masters, and the
parameters are their rounded copies. A float32 parameter is its own master; also where several ranks compute in bfloat16
(`sharding.py`), whose checkpoints name it as a master, so that one rank can read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.learning.shared.host_memory import HostMemory
from tasks.learning.shared.settings import OptimizerSettings
from tasks.learning.shared.sharding import part_of, whole

MASTER = "master"


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did: the gradient's norm before clipping, the rate, and whether weights changed."""

    grad_norm: float
    learning_rate: float
    is_finite: bool


class Optimizer:
    """Steps the parameters that require a gradient. A roll-back of the sentinel lowers `rate_scale`.

    With `is_offloaded` its state (averages and masters) is in host memory except between `load_to_device` and
    `offload`; on a CPU both do nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: OptimizerSettings,
        *,
        num_steps: int,
        is_offloaded: bool = False,
        computes_in: torch.dtype | None = None,
    ):
        self.settings, self.num_steps, self.steps_done, self.rate_scale = settings, num_steps, 0, 1.0
        self.steps_before = 0  # it started over: these count for no warm-up
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [_master(parameter) for parameter in self.parameters]
        self.parts = _torch_optimizers(model, self.parameters, self.masters, settings)
        self.computes_in = computes_in
        self.host = HostMemory(model.device) if is_offloaded and model.device.type != "cpu" else None
        self.offload()

    def step(self, *, position: int, is_loss_finite: bool = True) -> Step:
        """Apply and clear the accumulated gradients; where loss or gradient is not finite nothing changes.

        `position` is the place in the schedule of `num_steps`; skipped steps count.
        """
        assert 0 <= position < self.num_steps, "the schedule ends with the run"
        rate = self.rate_scale * learning_rate(
            self.settings,
            step=self.steps_done + 1 - self.steps_before,
            position=position,
            num_steps=self.num_steps,
        )
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.masters, self.settings.max_grad_norm)))
        is_finite = math.isfinite(norm) and is_loss_finite
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            if is_finite:
                part.step()
            part.zero_grad(set_to_none=True)
        for _, parameter, master in self._rounded():
            parameter.data.copy_(master)
        self.steps_done += 1
        return Step(norm, rate, is_finite)

    def start_over(self) -> None:
        """Forget the averages, and read the masters from the parameters, which a roll-back has put back. The rate warms
        up again: AdamW's first step without averages moves every weight by the whole rate.
        """
        self.steps_before = self.steps_done
        for part in self.parts:
            part.state.clear()
        for _, parameter, master in self._rounded():
            master.copy_(parameter.data)

    def state(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done, "steps_before": self.steps_before, "rate_scale": self.rate_scale}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps_done, self.steps_before = state["steps_done"], state["steps_before"]
        self.rate_scale = state["rate_scale"]

    def load_to_device(self) -> None:
        if self.host is not None:
            self.host.move_in(self.tensors())

    def offload(self) -> None:
        if self.host is not None:
            self.host.move_out(self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """The state itself, not copies: averages by part, index and name, and `master.<index>`."""
        averages = {
            f"{number}.{index}.{name}": value
            for number, part in enumerate(self.parts)
            for index, values in part.state_dict()["state"].items()
            for name, value in values.items()
        }
        return averages | {f"{MASTER}.{index}": master for index, master in self._named_masters()}

    def owners(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The master that each tensor of `tensors` is or belongs to, by name."""
        found = {}
        for name in names:
            part, index, *_ = name.split(".")
            found[name] = self.masters[int(index)] if part == MASTER else self._masters_of(int(part))[int(index)]
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over the state from whole tensors, named as in `tensors`; each rank takes its part of each."""
        self.load_to_device()
        for index, master in self._named_masters():
            key = f"{MASTER}.{index}"
            # One process saves no master of a float32 weight, which is its own: several ranks have it from the policy.
            if self.computes_in is None or key in tensors:
                master.copy_(part_of(tensors[key], master))
        for number, part in enumerate(self.parts):
            owners = self._masters_of(number)
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                owner, *place = key.split(".")
                if owner == str(number):
                    master = owners[int(place[0])]
                    is_average = value.shape == master.shape
                    state.setdefault(int(place[0]), {})[place[1]] = part_of(value, master) if is_average else value
            part.load_state_dict({**part.state_dict(), "state": state})
        self.offload()

    def _masters_of(self, part: int) -> list[Tensor]:
        return [master for group in self.parts[part].param_groups for master in group["params"]]

    def _named_masters(self) -> list[tuple[int, Tensor]]:
        """Those of weights that are computed with in fewer bits."""
        if self.computes_in is not None:
            return [*enumerate(master.detach() for master in self.masters)]
        return [(index, master) for index, _, master in self._rounded()]

    def _rounded(self) -> list[tuple[int, torch.nn.Parameter, Tensor]]:
        """The parameters with a master of their own."""
        pairs = zip(self.parameters, self.masters, strict=True)
        return [(index, *pair) for index, pair in enumerate(pairs) if pair[0] is not pair[1]]


def _master(parameter: torch.nn.Parameter) -> Tensor:
    """The parameter itself, or a float32 copy that takes over the gradient of each backward pass."""
    if parameter.dtype == torch.float32:
        return parameter
    master = parameter.detach().float()

    def take_gradient(of: Tensor) -> None:
        assert of.grad is not None, "the hook is called with a gradient"
        gradient, of.grad = of.grad.float(), None
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(take_gradient)
    return master


def _torch_optimizers(
    model: PreTrainedModel, parameters: list[torch.nn.Parameter], masters: list[Tensor], settings: OptimizerSettings
) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for the matrices inside the layers. Norms and biases do not decay."""
    matrices = _matrices(model)
    muon = {id(item) for item in matrices if settings.optimizer == "muon" and _is_inside(item, model)}
    decayed = {id(item) for item in matrices} - muon
    pairs = [(id(parameter), master) for parameter, master in zip(parameters, masters, strict=True)]
    groups = [
        {"params": [master for key, master in pairs if key in decayed], "weight_decay": settings.weight_decay},
        {"params": [master for key, master in pairs if key not in decayed | muon], "weight_decay": 0.0},
    ]
    parts: list[torch.optim.Optimizer] = []
    if hidden := [master for key, master in pairs if key in muon]:
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
    taken since the optimizer's averages were empty; the schedule counts positions, so that it ends with the run.
    """
    warmup = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    if settings.schedule == "constant":
        return settings.learning_rate * warmup
    done, final = position / num_steps, settings.final_learning_rate_share
    remaining = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * warmup * (final + (1 - final) * remaining)
