"""What a roll-back reads from a snapshot is what the trainer holds, also where files name tensors otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.learning.shared.reference import unique_tensors
from tasks.learning.shared.sharding import copy_tensors
from tasks.models.files import read_header
from tasks.models.folders import save_snapshot
from tasks.models.settings import on_cpu
from tasks.stages.train.snapshots import policy_weights
from tests import tiny
from tests.contracts.families import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize(("family", "is_converted"), [("qwen3_moe", True), ("granite", False)])
def test_a_snapshots_weights_return_to_the_model_they_came_from(
    tmp_path: Path, family: str, is_converted: bool
) -> None:
    """The experts of a layer are one tensor of the module, and one each in the files of a family with experts."""
    model, other = FAMILIES[family].model(), FAMILIES[family].model()
    snapshot = tmp_path / "iteration-0001"
    save_snapshot(snapshot, model, tiny.tokenizer())
    stored = {name for name, _, _ in read_header(snapshot / "model.safetensors")}
    assert (not stored <= model.state_dict().keys()) == is_converted
    with torch.no_grad():
        for tensor in unique_tensors(other).values():
            tensor.zero_()
        copy_tensors(policy_weights(snapshot, compute=on_cpu(1)), unique_tensors(other))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
