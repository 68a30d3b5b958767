"""The policy and its trainer, as every rank of a run makes them. Rank 0 has the rest of the run (`run.py`) around them;
the others follow it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.checkpoints import seed_generators
from tasks.learning.shared.lora import Adapter
from tasks.learning.shared.ranks import Ranks
from tasks.models.folders import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tasks.stages.train.settings import TrainSections


def refuse_cut(settings: TrainSections, num_ranks: int) -> None:
    """ValueError for what several ranks cannot do with a policy that is cut over them."""
    compute, lora = settings.compute, settings.train.lora
    for is_wrong, message in (
        (
            compute.offload == "optimizer",
            "compute.offload is optimizer, which moves whole tensors. Set compute.offload to none: each rank has its "
            "part of the optimizer's state only",
        ),
        (
            lora is not None and compute.weights == "bfloat16" and compute.frozen == "float32",
            "compute.weights is bfloat16 and compute.frozen float32, and a layer computes in one dtype. Set "
            "compute.frozen to bfloat16, or compute.weights to float32",
        ),
    ):
        if is_wrong:
            raise ValueError(f"{num_ranks} ranks train one policy, and {message}; or set launch.num_trainers to 1.")


def load_policy(settings: TrainSections, start: Path) -> tuple[PreTrainedModel, Adapter | None]:
    """The order matters: the generators are seeded between the model and the adapter, which draws from them."""
    compute, lora = settings.compute, settings.train.lora
    model = load_model(start, compute=compute, dtype=compute.frozen if lora else None)
    seed_generators(settings.seed)
    return model, None if lora is None else Adapter(model, lora, weights=compute.weights)


def build_trainer(
    settings: TrainSections, model: PreTrainedModel, adapter: Adapter | None, ranks: Ranks
) -> GRPOTrainer:
    return GRPOTrainer(
        model,
        settings.train,
        compute=settings.compute,
        temperature=settings.sampling.temperature,
        max_tokens=settings.sampling.max_tokens_per_episode,
        adapter=adapter,
        ranks=ranks,
    )


def follow_leader(settings: TrainSections, start: Path, ranks: Ranks) -> None:
    """On every rank but 0: take part in each step until rank 0 ends."""
    build_trainer(settings, *load_policy(settings, start), ranks).follow()
