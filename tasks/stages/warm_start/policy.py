"""The policy and its trainer in one attempt of a warm start, as every rank makes them. Rank 0 has the run (`run.py`)
around them; the others follow it from attempt to attempt.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.learning.sft.trainer import SupervisedTrainer
from tasks.learning.shared.checkpoints import seed_generators
from tasks.learning.shared.ranks import Ranks
from tasks.learning.shared.rows import Row
from tasks.learning.shared.whole_policy import refuse_other_weights
from tasks.models.folders import load_model
from tasks.models.settings import ComputeSettings
from tasks.models.torch_setup import find_device, free_unused
from tasks.stages.warm_start.settings import WarmStartSections

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Beginning:
    """What rank 0 begins an attempt with, and sends to the others: the model folder and the hash of its weights, and
    the rows, which are trained on, and those held out.
    """

    start: Path
    weights: str
    seed: int
    learning_rate: float
    rows: Sequence[Row]
    held_out: Sequence[Row]


def load_start(settings: WarmStartSections, begun: Beginning) -> PreTrainedModel:
    seed_generators(begun.seed)
    return load_model(begun.start, compute=settings.compute)


def build_trainer(
    settings: WarmStartSections, begun: Beginning, model: PreTrainedModel, ranks: Ranks
) -> SupervisedTrainer:
    params = settings.warm_start.model_copy(update={"learning_rate": begun.learning_rate})
    return SupervisedTrainer(model, begun.rows, params, seed=begun.seed, held_out=begun.held_out, ranks=ranks)


def follow_leader(settings: WarmStartSections, ranks: Ranks) -> None:
    """On every rank but 0: take part in the steps of each attempt until rank 0 ends."""
    while (begun := ranks.await_start()) is not None:
        refuse_other_weights(begun.start, begun.weights)
        build_trainer(settings, begun, load_start(settings, begun), ranks).follow()
        free_trainer(settings.compute)


def free_trainer(compute: ComputeSettings) -> None:
    """Give the device's memory back after an attempt's trainer has gone."""
    gc.collect()
    free_unused(find_device(compute))
