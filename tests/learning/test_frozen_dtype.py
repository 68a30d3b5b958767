"""Weights that never change in bfloat16: the reference of a float32 policy, and a base under float32 adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.agreement import trainer_logp
from tasks.learning.shared.batching import MicroBatch, micro_batches
from tasks.learning.shared.checkpoints import seed_generators
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.lora import POLICY, SERVED, Adapter, adapter_tensors, frozen_copy
from tasks.learning.shared.policy import LogProbs
from tasks.learning.shared.reference import Reference, unique_tensors, with_tied
from tasks.learning.shared.rows import Row
from tasks.learning.shared.sharding import copy_tensors
from tasks.models.architecture import model_logp
from tasks.models.differences import Differences, tolerance_of
from tasks.models.folders import load_model
from tasks.models.settings import ComputeSettings, on_cpu
from tests import tiny
from tests.learning.options import grpo
from tests.learning.test_trainer import LORA, fresh

BF16 = on_cpu(1).model_copy(update={"frozen": "bfloat16"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


def a_batch() -> MicroBatch:
    ids = list(range(20, 60))
    (batch,) = micro_batches([[Row(ids, [False] + [True] * 39, [0.0] * 40, 1.0)]], packing="tree", max_tokens=40,
                             device=torch.device("cpu"))  # fmt: skip
    return batch


def lora_trainer(folder: Path, compute: ComputeSettings) -> GRPOTrainer:
    model = load_model(folder, compute=compute, dtype=compute.frozen)
    options = grpo(lora=LORA.model_dump(), kl_weight=0.1)
    seed_generators(0)
    adapter = Adapter(model, LORA, weights=compute.weights)
    return GRPOTrainer(model, options, compute=compute, temperature=1.0, max_tokens=200, adapter=adapter)


def test_a_reference_in_bfloat16_takes_half_and_says_nearly_the_same(folder: Path) -> None:
    model, batch = load_model(folder, compute=on_cpu(1)), a_batch()
    lanes, logps = Lanes(model, num_threads=1, num_ranks=1), []
    for frozen in ("float32", "bfloat16"):
        reference = Reference(LogProbs(model), frozen=frozen)
        assert {str(tensor.dtype) for tensor in reference.tensors().values()} == {f"torch.{frozen}"}
        (logp_M,) = reference.logps([batch], lanes=lanes, temperature=1.0, autocast="none")
        logps.append(logp_M)
        assert logp_M.dtype == torch.float32
    found = Differences.of((logps[0] - logps[1]).tolist())
    assert found.mean > 0 and found.is_within(tolerance_of("bfloat16"))
    assert model.dtype == torch.float32


@pytest.mark.parametrize("mix", [1.0, 0.5])
def test_a_reference_in_bfloat16_follows_a_float32_policy(folder: Path, mix: float) -> None:
    """Every weight doubled: the reference moves to it, or half the way, rounded to 8 bits."""
    model = load_model(folder, compute=on_cpu(1))
    reference = Reference(LogProbs(model), frozen="bfloat16")
    before = {name: tensor.float() for name, tensor in reference.tensors().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    reference.follow(mix)
    for name, tensor in reference.tensors().items():
        torch.testing.assert_close(tensor.float(), before[name] * (1 + mix), atol=0, rtol=2**-7)


@pytest.mark.slow
def test_float32_adapters_are_trained_on_a_base_in_bfloat16_that_stays(folder: Path) -> None:
    trainer = lora_trainer(folder, BF16)
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    rows = [trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0])) for _ in range(2)]
    assert not any(row["non_finite"] for row in rows) and rows[1]["kl"] > 0
    policy = trainer.tensors()["policy"]
    assert {tensor.dtype for tensor in policy.values()} == {torch.float32}
    assert any(tensor.abs().max() > 0 for name, tensor in policy.items() if "lora_B" in name)
    assert all(torch.equal(base[name], p) for name, p in trainer.model.named_parameters() if name in base)


@pytest.mark.slow
def test_an_engines_copy_shares_the_base_and_has_an_adapter_of_its_own(folder: Path) -> None:
    trainer = lora_trainer(folder, on_cpu(1))
    served = frozen_copy(trainer.model)
    storage = {p.data_ptr() for p in trainer.model.parameters()}
    copied = {name for name, p in served.named_parameters() if p.data_ptr() not in storage}
    assert copied and all("lora_" in name for name in copied)
    before = {name: tensor.clone() for name, tensor in adapter_tensors(served, POLICY).items()}
    trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter_tensors(served, POLICY).items())


@pytest.mark.slow
def test_an_adapter_kept_for_an_engine_is_that_of_its_version_merged_and_as_files(folder: Path, tmp_path: Path) -> None:
    """Noted after one iteration and given to the engine after the next, with plain names and a tied head twice."""
    from safetensors.torch import load_file

    trainer = lora_trainer(folder, on_cpu(1))
    adapter, ids = trainer.adapter, [list(range(20, 60))]
    assert adapter is not None
    adapter.add_copy(SERVED)
    trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    noted = {name: tensor.clone() for name, tensor in adapter.tensors(POLICY).items()}
    expected = trainer_logp(trainer.log_probs, ids, trainer.settings)
    trainer.iterate(fresh([1.0, 0.0, 0.0, 0.0]))
    copy_tensors(noted, adapter.tensors(SERVED))
    weights, plain = adapter.weights(SERVED), load_model(folder, compute=on_cpu(1))
    assert [name for name, _ in weights.tensors()] == list(plain.state_dict())
    plain.load_state_dict(dict(weights.tensors()))
    assert model_logp(plain, ids)[0] == pytest.approx(expected[0], abs=1e-5)
    assert weights.save_adapter is not None
    weights.save_adapter(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sorted(float(t.norm()) for t in saved.values()) == sorted(float(t.norm()) for t in noted.values())


def test_a_copy_of_the_trained_tensors_has_tied_ones_under_both_names(folder: Path) -> None:
    model = load_model(folder, compute=on_cpu(1))
    copy = {name: tensor.clone() for name, tensor in unique_tensors(model).items()}
    found = dict(with_tied(model, copy))
    assert found.keys() == model.state_dict().keys() > copy.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
