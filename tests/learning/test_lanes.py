"""Two threads that compute two micro-batches at once give what one thread gives, and the same bits each time."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.batching import MicroBatch, micro_batches, share_of
from tasks.learning.shared.checkpoints import seed_generators
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.lora import Adapter
from tasks.learning.shared.optimizer import Optimizer
from tasks.learning.shared.ranks import ALONE
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import LoRASettings
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tests import tiny
from tests.learning.options import grpo
from tests.learning.rows import a_group

CPU = torch.device("cpu")
GROUPS = [a_group(number, [1.0, 0.0, 0.0]) for number in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


def trained(folder: Path, num_threads: int, **changed: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """What two iterations make of the policy, and the last one's metrics."""
    compute = on_cpu(num_threads)
    options = grpo(kl_weight=0.1, **changed)
    model = load_model(folder, compute=compute)
    seed_generators(0)
    adapter = Adapter(model, options.lora, weights="float32") if options.lora else None
    trainer = GRPOTrainer(model, options, compute=compute, temperature=1.0, max_tokens=200, adapter=adapter)
    metrics = [trainer.iterate(lambda *_: GROUPS) for _ in range(2)]
    return torch.cat([tensor.flatten() for tensor in trainer.policy_tensors().values()]), metrics[-1]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"packing": "none"},
        {"steps_per_batch": 2},
        {"gradient_checkpointing": True},
        {"lora": LoRASettings(rank=4, alpha=8, target_modules="all-linear")},
    ],
)
def test_two_lanes_train_as_one_thread_does_with_the_same_bits_each_time(folder: Path, changed: dict[str, Any]) -> None:
    (one, _), (two, metrics), (again, same) = (trained(folder, number, **changed) for number in (1, 2, 2))
    assert torch.equal(two, again) and metrics == same
    assert torch.allclose(one, two, atol=1e-4)


def a_row(length: int) -> Row:
    return Row([1] * length, [False] + [True] * (length - 1), [0.0] * length, 1.0)


def test_lanes_divide_trees_and_the_positions_of_a_forward() -> None:
    """Inputs of 60, 40, 30 and 30 positions: 60 + 30 in one lane and 40 + 30 in the other, at most 100 / 2 at once."""
    groups = [[a_row(length + 1)] for length in (60, 40, 30, 30)]
    share = share_of(groups, packing="tree", max_tokens=100, device=CPU, rank=0, num_ranks=1, num_lanes=2)
    assert [batch.ids_BT.numel() for batch in share.batches] == [60, 40, 30, 30]
    whole = share_of(groups, packing="tree", max_tokens=200, device=CPU, rank=0, num_ranks=1, num_lanes=2)
    assert [batch.ids_BT.numel() for batch in whole.batches] == [90, 70]


def test_a_group_is_divided_where_its_tree_would_fill_both_lanes() -> None:
    """Two rows of 45 inputs with nothing in common: 90 positions, of which one lane may have 50."""
    group = [replace(a_row(46), token_ids=[token] * 46) for token in (2, 3)]
    share = share_of([group], packing="tree", max_tokens=100, device=CPU, rank=0, num_ranks=1, num_lanes=2)
    assert [batch.ids_BT.numel() for batch in share.batches] == [45, 45]


def batches_of(*lengths: int) -> list[MicroBatch]:
    groups = [[a_row(length + 1)] for length in lengths]
    return micro_batches(groups, packing="tree", max_tokens=max(lengths), device=CPU)


def test_gradients_are_added_in_the_order_of_the_micro_batches_whichever_lane_is_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(folder, compute=on_cpu(2))
    lanes, optimizer = Lanes(model, num_threads=2, max_tokens=40, ranks=ALONE), Optimizer(model, grpo(), num_steps=1)
    weight = optimizer.parameters[0]
    added: list[float] = []
    monkeypatch.setattr(optimizer, "add", lambda found: added.append(float(found[0].flatten()[0])))

    def loss(number: int) -> torch.Tensor:
        time.sleep(0.05 * (number == 0))
        return number * weight.sum()

    lanes.add_gradients(loss, batches_of(10, 10, 10, 10), optimizer=optimizer)
    assert added == [0.0, 1.0, 2.0, 3.0]


def test_a_long_tree_beside_a_short_one_is_computed_with_all_threads(folder: Path) -> None:
    """20 of 30 positions is more than 1.25 of half; 10 of 20 is half."""
    model = load_model(folder, compute=on_cpu(2))
    lanes = Lanes(model, num_threads=2, max_tokens=40, ranks=ALONE)
    assert (lanes.count, Lanes(model, num_threads=1, max_tokens=40, ranks=ALONE).count) == (2, 1)
    assert lanes.fit(batches_of(10, 10)) and not lanes.fit(batches_of(20, 10)) and not lanes.fit(batches_of(20))


def test_two_long_sequences_are_computed_one_after_the_other(folder: Path) -> None:
    """2 × 30 positions are more than the 40 of a forward."""
    lanes = Lanes(load_model(folder, compute=on_cpu(2)), num_threads=2, max_tokens=40, ranks=ALONE)
    assert lanes.fit(batches_of(20, 20)) and not lanes.fit(batches_of(30, 30))


def test_gradients_of_few_micro_batches_are_alive_at_once_and_none_is_computed_after_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 micro-batches on two lanes: that which is added, and two or three begun."""
    model = load_model(folder, compute=on_cpu(2))
    lanes, optimizer = (
        Lanes(model, num_threads=2, max_tokens=40, ranks=ALONE),
        Optimizer(model, grpo(), num_steps=1),
    )
    begun, added = list[int](), list[int]()

    def add(found: Any) -> None:
        assert len(begun) - len(added) <= 4
        added.append(len(begun))

    monkeypatch.setattr(optimizer, "add", add)
    weight = optimizer.parameters[0]

    def loss(number: int) -> torch.Tensor:
        begun.append(number)
        if number == 5 and len(added) < 20:
            raise ValueError("no memory")
        return weight.sum()

    with pytest.raises(ValueError, match="no memory"):
        lanes.add_gradients(loss, batches_of(*[10] * 20), optimizer=optimizer)
    num_begun = len(begun)
    assert len(added) == 5 and num_begun <= 8
    time.sleep(0.05)
    assert len(begun) == num_begun
