"""Micro-batches in two threads: the same gradients, no bit that depends on which is faster, and no lane left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.sft.trainer import SupervisedTrainer
from tasks.learning.shared import batching, lanes
from tasks.learning.shared.batching import Share, share_of
from tasks.learning.shared.checkpoints import seed_generators
from tasks.learning.shared.lanes import Lanes
from tasks.learning.shared.lora import Adapter
from tasks.learning.shared.policy import token_logp
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import Packing
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tests import tiny
from tests.learning.options import grpo, supervised
from tests.learning.rows import a_group, random_rows, weights
from tests.learning.test_trainer import LORA

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


def lanes_of(folder: Path, **changed: Any) -> Lanes:
    model = load_model(folder, compute=on_cpu(2))
    return Lanes(model, **{"num_threads": 2, "num_ranks": 1, **changed})


def share(rows: list[Row], *, packing: Packing = "tree", max_tokens: int = 100, num_lanes: int = 2) -> Share:
    return share_of(
        [[row] for row in rows], packing=packing, max_tokens=max_tokens, device=CPU, rank=0, num_ranks=1,
        num_lanes=num_lanes,
    )  # fmt: skip


def gradient(own: Lanes, model: torch.nn.Module, batches: Any, loss_of: Callable[..., Any]) -> Tensor:
    model.zero_grad()
    own.backward(batches, loss_of)
    return torch.cat([item.grad.flatten() for item in own.parameters if item.grad is not None])


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("packing", ["tree", "none"])
def test_two_lanes_add_up_to_the_gradient_of_one_and_to_the_same_bits_whichever_is_slow(
    folder: Path, packing: Packing, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.learning.shared.policy.chunk_size", lambda *_: 7 if is_chunked else 10**9)
    model, chance = load_model(folder, compute=on_cpu(2)), random.Random(1)
    two, one = Lanes(model, num_threads=2, num_ranks=1), Lanes(model, num_threads=1, num_ranks=1)
    assert (two.number, one.number) == (2, 1)
    rows = random_rows(1, 12)

    def loss_of(batch: Any) -> tuple[Tensor, int]:
        time.sleep(chance.choice((0.0, 0.0, 0.01)))
        return -token_logp(model, batch).sum(), batch.num_tokens

    dealt = share(rows, packing=packing).batches
    assert {batch.lane for batch in dealt} == {0, 1} and len(dealt) > 2
    whole = gradient(one, model, share(rows, packing=packing, num_lanes=1).batches, loss_of)
    found = [gradient(two, model, dealt, loss_of) for _ in range(3)]
    torch.testing.assert_close(found[0], whole, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert two.backward(dealt, loss_of) == [batch.num_tokens for batch in dealt]


class Sum(torch.nn.Module):
    """Two parameters that are added: torch gives both one and the same tensor as their gradient."""

    device = CPU

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))


def test_two_parameters_with_one_gradient_each_get_it_once() -> None:
    """The loss of each batch is the sum of one + other: a gradient of 1 in each place."""
    model, dealt = Sum(), share(random_rows(1, 12)).batches
    own = Lanes(model, num_threads=2, num_ranks=1)
    found = gradient(own, model, dealt, lambda batch: ((model.one + model.other).sum(), None))
    assert found.tolist() == [float(len(dealt))] * 6


def test_what_is_computed_without_gradients_comes_in_the_order_of_the_batches(folder: Path) -> None:
    own, dealt = lanes_of(folder), share(random_rows(2, 9)).batches
    assert own.each(dealt, lambda batch: id(batch)) == [id(batch) for batch in dealt]
    with torch.no_grad():
        assert own.each(dealt, lambda batch: torch.is_grad_enabled()) == [False] * len(dealt)


def of_lengths(*lengths: int) -> list[Row]:
    return [Row([5] * (length + 1), [False] + [True] * length, [0.0] * (length + 1), 1.0) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "num_lanes"),
    [((30, 30), 2), ((30, 20), 2), ((30, 10), 1), ((30,), 1), ((51, 51), 1), ((50, 50), 2), ((20, 20, 20), 1)],
)
def test_lanes_share_a_step_only_where_none_waits_for_long_and_each_tree_fits_its_part(
    lengths: tuple[int, ...], num_lanes: int
) -> None:
    """30 and 20 positions: the longer lane has 30 for an even 25, 1.2 of it; 20 and 40: 1.33."""
    batches = share(of_lengths(*lengths)).batches
    assert len({batch.lane for batch in batches}) == num_lanes
    assert sum(batch.num_tokens for batch in batches) == sum(lengths)
    if num_lanes > 1:
        assert all(batch.ids_BT.numel() <= 50 for batch in batches)


def test_a_small_model_of_float32_alone_on_a_cpu_with_two_threads_has_two_lanes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lanes_of(folder).number == 2
    assert lanes_of(folder, num_threads=1).number == 1
    assert lanes_of(folder, num_ranks=2).number == 1
    in_bf16 = load_model(folder, compute=on_cpu(2), dtype="bfloat16")
    assert Lanes(in_bf16, num_threads=2, num_ranks=1).number == 1
    checkpointed = load_model(folder, compute=on_cpu(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    assert Lanes(checkpointed, num_threads=2, num_ranks=1).number == 1
    monkeypatch.setattr(lanes, "MAX_BYTES", 1000)
    assert lanes_of(folder).number == 1


def test_an_error_in_one_lane_is_raised_once_the_other_has_ended(folder: Path) -> None:
    own, ended = lanes_of(folder), list[int]()
    dealt = share(random_rows(3, 10), max_tokens=70).batches

    def compute(batch: Any) -> None:
        if batch.lane == 0:
            raise ValueError("in a lane")
        time.sleep(0.05)
        ended.append(batch.lane)

    with pytest.raises(ValueError, match="in a lane"):
        own.each(dealt, compute)
    assert ended == [1] * sum(batch.lane for batch in dealt)


@pytest.mark.parametrize("changed", [{}, {"lora": LORA.model_dump()}, {"steps_per_batch": 2}, {"autocast": "bfloat16"}])
def test_an_iteration_in_two_lanes_takes_the_steps_of_one(
    folder: Path, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of several lengths; kl, old log-probs and reference included. bfloat16 products round by batch."""
    groups = [a_group(number, [0.0, 1.0, 1.0, 0.0]) for number in range(6)]
    lanes_of_step, rows, ends = list[set[int]](), [], []
    cut = batching.own_share

    def seen(*arguments: Any, **named: Any) -> Share:
        found = cut(*arguments, **named)
        lanes_of_step.append({batch.lane for batch in found.batches})
        return found

    monkeypatch.setattr("tasks.learning.grpo.trainer.own_share", seen)
    for num_threads in (1, 2):
        options = grpo(**{"kl_weight": 0.1, "learning_rate": 1e-4, **changed})
        model = load_model(folder, compute=on_cpu(num_threads))
        seed_generators(0)
        adapter = Adapter(model, options.lora, weights="float32") if options.lora else None
        trainer = GRPOTrainer(
            model, options, compute=on_cpu(num_threads), temperature=1.0, max_tokens=200, adapter=adapter
        )
        rows.append([trainer.iterate(lambda *_: groups) for _ in range(3)])
        ends.append(weights(trainer.model))
    assert {0} in lanes_of_step and {0, 1} in lanes_of_step
    exact = changed.get("autocast") is None
    for one, two in zip(*rows, strict=True):
        for name in ("loss", "kl", "grad_norm", "ratio_max", "clip_share"):
            assert two[name] == pytest.approx(one[name], rel=1e-3 if exact else 0.2, abs=1e-5 if exact else 2e-2), name
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-5 if exact else 1e-3)


def test_a_warm_start_in_two_lanes_takes_the_steps_of_one(folder: Path) -> None:
    found, threads = [], torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        trainer = SupervisedTrainer(
            load_model(folder, compute=on_cpu(num_threads)), random_rows(3, 16),
            supervised(batch_size=8, learning_rate=1e-4), seed=1, held_out=random_rows(4, 8),
        )  # fmt: skip
        assert trainer.lanes.number == num_threads
        steps = [trainer.step()["loss"] for _ in range(6)]
        found.append(torch.tensor([*steps, trainer.held_out_loss()]))
    torch.set_num_threads(threads)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
