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
