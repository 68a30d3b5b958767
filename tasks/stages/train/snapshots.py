"""The snapshots of a run: folders `iteration-NNNN` beside the checkpoints. One may be promoted or rolled back to."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tasks.core.files import link_or_copy, number_of
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.checkpoints import Checkpoints
from tasks.learning.shared.reference import unique_tensors
from tasks.learning.shared.whole_policy import WholePolicy
from tasks.models.adapters import PREFIX
from tasks.models.files import ADAPTER
from tasks.models.folders import is_adapter, load_model, save_adapter, save_snapshot, stored_dtype
from tasks.models.saving import rehearse_saving
from tasks.models.settings import ComputeSettings
from tasks.models.torch_setup import prepare_torch


class Snapshots:
    """`policy` is the trainer's, in one piece; `base` the model folder that the snapshot of an adapter points to."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: GRPOTrainer,
        policy: WholePolicy,
        tokenizer: PreTrainedTokenizerBase,
        *,
        base: Path,
    ):
        self.checkpoints, self.trainer, self.policy = checkpoints, trainer, policy
        self.tokenizer, self.base = tokenizer, base
        rehearse_saving(base, policy.model, tokenizer)

    def save(self) -> None:
        folder = self.checkpoints.snapshots / f"iteration-{self.trainer.iteration:04d}"
        self.policy.take(self.trainer.policy_tensors())
        if self.policy.adapter is None:
            save_snapshot(folder, self.policy.model, self.tokenizer, dtype=stored_dtype(self.base))
        else:
            save_adapter(folder, self.policy.adapter.save, self.tokenizer, base=self.base)

    def newest_before(self, iteration: int) -> Path:
        return [item for item in self.checkpoints.current_snapshots() if number_of(item.name) < iteration][-1]

    def give_up_after(self, iteration: int) -> None:
        """Mark the snapshots after `iteration` as no part of the run; the next checkpoint deletes them."""
        for snapshot in self.checkpoints.current_snapshots():
            if number_of(snapshot.name) > iteration:
                self.checkpoints.give_up_snapshot(snapshot.name)

    def export(self, output: Path) -> None:
        """All but iteration 0 into `output`, and that one where a run ends that was rolled back to it and has no other.
        Files are linked where possible, which costs nothing.
        """
        found = self.checkpoints.current_snapshots()
        trained = [snapshot for snapshot in found if number_of(snapshot.name) > 0]
        is_done = self.trainer.iteration == self.trainer.settings.num_iterations
        for snapshot in found if is_done and not trained else trained:
            shutil.copytree(snapshot, output / snapshot.name, copy_function=link_or_copy)


def policy_weights(snapshot: Path, *, compute: ComputeSettings) -> dict[str, Tensor]:
    """In host memory, by the names of the trainer: files have the published ones, which some families convert."""
    if is_adapter(snapshot):
        return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(snapshot / ADAPTER).items()}
    model = load_model(snapshot, compute=compute.model_copy(update={"device": "cpu"}))
    prepare_torch(compute)  # which loading set up for a CPU
    return unique_tensors(model)
