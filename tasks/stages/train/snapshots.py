"""The snapshots of a run under way: one folder `iteration-NNNN` per iteration that is kept, beside the checkpoints.

A snapshot may be promoted, and a roll back goes back to one. Left out: when one is due (`run.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tasks.core.files import link_or_copy, number_of
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.checkpoints import Checkpoints
from tasks.models.folders import save_adapter, save_snapshot

PEFT_PREFIX = "base_model.model."


class Snapshots:
    """The snapshots of one run; `base` is the model folder that the snapshot of an adapter points to."""

    def __init__(
        self, checkpoints: Checkpoints, trainer: GRPOTrainer, tokenizer: PreTrainedTokenizerBase, *, base: Path
    ):
        self.checkpoints, self.trainer, self.tokenizer, self.base = checkpoints, trainer, tokenizer, base

    def save(self) -> None:
        """The policy as it is, under the iteration it is at."""
        folder = self.checkpoints.snapshots / f"iteration-{self.trainer.iteration:04d}"
        if self.trainer.adapter is None:
            save_snapshot(folder, self.trainer.model, self.tokenizer)
        else:
            save_adapter(folder, self.trainer.adapter.save, self.tokenizer, base=self.base)

    def newest_before(self, iteration: int) -> Path:
        return [item for item in self.checkpoints.current_snapshots() if number_of(item.name) < iteration][-1]

    def give_up_after(self, iteration: int) -> None:
        """Those after `iteration` are no part of the run any more; the next checkpoint makes it so."""
        for snapshot in self.checkpoints.current_snapshots():
            if number_of(snapshot.name) > iteration:
                self.checkpoints.give_up_snapshot(snapshot.name)

    def export(self, output: Path) -> None:
        """All but the start into `output`; files are linked where they can be, so that this costs nothing."""
        for snapshot in self.checkpoints.current_snapshots():
            if number_of(snapshot.name) > 0:
                shutil.copytree(snapshot, output / snapshot.name, copy_function=link_or_copy)


def policy_weights(snapshot: Path) -> dict[str, Tensor]:
    """The weights of a snapshot under the trainer's names: a whole model's, or an adapter's."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(snapshot.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
