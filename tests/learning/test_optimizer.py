"""What decays; float32 masters of 16-bit weights; state that waits in host memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tasks.learning.shared.host_memory import HostMemory
from tasks.learning.shared.optimizer import Optimizer
from tests.learning.options import supervised


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_matrices_and_embeddings_decay_and_norms_and_biases_do_not(optimizer: str) -> None:
    """A step with a gradient of zero is decay alone: with rate 0.5 and decay 0.5, what decays loses a quarter."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    # As in gpt-oss, where the biases of a layer's experts are one matrix.
    model.transformer.h[0].experts_bias = torch.nn.Parameter(torch.ones(3, 8))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    settings = supervised(optimizer=optimizer, schedule="constant", learning_rate=0.5, weight_decay=0.5)
    Optimizer(model, settings, num_steps=1).step(position=0)
    for name, parameter in model.named_parameters():
        is_kept = "bias" in name or "ln_" in name
        assert torch.equal(parameter, torch.full_like(parameter, 1.0 if is_kept else 0.75)), name


def one_matrix(dtype: torch.dtype) -> GPT2LMHeadModel:
    """A model of which only one row of 8 ones is trained."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)).to(dtype)
    model.requires_grad_(False)
    model.transformer.h[0].extra = torch.nn.Parameter(torch.ones(1, 8, dtype=dtype))
    return model


def steps(model: GPT2LMHeadModel, optimizer: Optimizer, count: int) -> torch.Tensor:
    """The row after `count` steps with a gradient of 1 for each element."""
    row = model.transformer.h[0].extra
    for _ in range(count):
        (row * torch.ones_like(row)).sum().backward()
        optimizer.step(position=0)
    return row.detach()


def test_steps_that_bfloat16_cannot_hold_add_up_on_the_master() -> None:
    """AdamW moves by the rate where all gradients are equal: 100 steps of 0.001 from 1 end at 0.9, which bfloat16 holds
    as 0.8984375. Without a master each step would be rounded away: its next number below 1 is 0.996.
    """
    settings = supervised(schedule="constant", learning_rate=1e-3, weight_decay=0.0)
    model = one_matrix(torch.bfloat16)
    optimizer = Optimizer(model, settings, num_steps=1)
    row = steps(model, optimizer, 100)
    assert row.tolist() == [[0.8984375] * 8]
    assert optimizer.tensors()["master.0"].tolist()[0] == pytest.approx([0.9] * 8, abs=1e-5)


def test_gradients_are_added_up_and_clipped_in_float32() -> None:
    """256 + 1 is 256 in bfloat16. The norm of eight elements of 257 is 257·√8; clipped to 1, each is 1/√8."""
    model = one_matrix(torch.bfloat16)
    optimizer = Optimizer(model, supervised(learning_rate=1.0, max_grad_norm=1.0), num_steps=1)
    row = model.transformer.h[0].extra
    for size in (256.0, 1.0):
        (row * size).sum().backward()
        assert row.grad is None  # the 16-bit gradient is gone as soon as it is added
    assert optimizer.masters[0].grad.tolist() == [[257.0] * 8]
    assert optimizer.step(position=0).grad_norm == pytest.approx(257 * 8**0.5)
    assert optimizer.masters[0].grad is None


def test_a_float32_parameter_is_its_own_master() -> None:
    model = one_matrix(torch.float32)
    optimizer = Optimizer(model, supervised(), num_steps=1)
    steps(model, optimizer, 1)
    assert optimizer.masters[0] is model.transformer.h[0].extra
    assert set(optimizer.tensors()) == {"0.0.step", "0.0.exp_avg", "0.0.exp_avg_sq"}


def test_masters_are_kept_and_put_back_bitwise() -> None:
    settings = supervised(schedule="constant", learning_rate=1e-3)
    whole, first, second = (one_matrix(torch.bfloat16) for _ in range(3))
    steps(whole, expected := Optimizer(whole, settings, num_steps=1), 30)
    steps(first, stopped := Optimizer(first, settings, num_steps=1), 15)
    kept = {name: tensor.clone() for name, tensor in stopped.tensors().items()}
    resumed = Optimizer(second, settings, num_steps=1)
    second.load_state_dict(first.state_dict())
    resumed.load_tensors(kept)
    resumed.steps_done = stopped.steps_done
    steps(second, resumed, 15)
    assert all(torch.equal(tensor, resumed.tensors()[name]) for name, tensor in expected.tensors().items())
    assert torch.equal(whole.transformer.h[0].extra, second.transformer.h[0].extra)


def test_starting_over_reads_the_master_from_the_weights_that_were_put_back() -> None:
    model = one_matrix(torch.bfloat16)
    optimizer = Optimizer(model, supervised(schedule="constant", learning_rate=1e-3), num_steps=1)
    steps(model, optimizer, 20)
    with torch.no_grad():
        model.transformer.h[0].extra.fill_(2.0)
    optimizer.start_over()
    assert {name: tensor.tolist() for name, tensor in optimizer.tensors().items()} == {"master.0": [[2.0] * 8]}


def test_after_starting_over_the_rate_warms_up_again_also_after_a_resume() -> None:
    """Four steps of warm-up to 0.4: by 0.1, 0.2, 0.3, 0.4 and 0.4 of 1; started over with half the rate, by 0.05, 0.1,
    and, resumed there, 0.15, 0.2 and 0.2.
    """
    settings = supervised(schedule="constant", learning_rate=0.4, warmup_steps=4)
    model = one_matrix(torch.float32)
    optimizer = Optimizer(model, settings, num_steps=1)

    def moved(count: int) -> list[float]:
        rows = [model.transformer.h[0].extra[0, 0].item()]
        rows += [steps(model, optimizer, 1)[0, 0].item() for _ in range(count)]
        return [before - after for before, after in pairwise(rows)]

    assert moved(5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4], abs=1e-5)
    optimizer.start_over()
    optimizer.rate_scale = 0.5
    assert moved(2) == pytest.approx([0.05, 0.1], abs=1e-5)
    stopped, optimizer = optimizer, Optimizer(model, settings, num_steps=1)
    optimizer.load_tensors(stopped.tensors())
    optimizer.load_state(stopped.state())
    assert moved(3) == pytest.approx([0.15, 0.2, 0.2], abs=1e-5)
    assert optimizer.steps_done == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_moves_to_the_host_between_updates_changes_no_bit(dtype: torch.dtype) -> None:
    """The host's buffers stand in for a device too: data moves, names, objects and values stay."""
    settings = supervised(schedule="constant", learning_rate=1e-3)
    plain, moved = one_matrix(dtype), one_matrix(dtype)
    expected, found = Optimizer(plain, settings, num_steps=1), Optimizer(moved, settings, num_steps=1)
    found.host = HostMemory(torch.device("cpu"))
    for _ in range(3):
        steps(plain, expected, 2)
        found.load_to_device()
        steps(moved, found, 2)
        on_device = {name: tensor.data_ptr() for name, tensor in found.tensors().items()}
        found.offload()
        assert {name: tensor.data_ptr() for name, tensor in found.tensors().items()} == {
            name: buffer.data_ptr() for name, buffer in found.host.buffers.items()
        }
        assert on_device.keys() == found.host.buffers.keys()
    assert torch.equal(plain.transformer.h[0].extra, moved.transformer.h[0].extra)
    assert all(torch.equal(tensor, found.tensors()[name]) for name, tensor in expected.tensors().items())


def test_on_a_cpu_nothing_is_offloaded() -> None:
    assert Optimizer(one_matrix(torch.bfloat16), supervised(), num_steps=1, is_offloaded=True).host is None


def test_on_a_device_the_state_is_on_the_host_from_the_start() -> None:
    """The meta device stands in for CUDA: masters are on the host before the first rollout, and go in and out."""
    model = one_matrix(torch.bfloat16).to("meta")
    moves: list[str] = []

    class Noted(HostMemory):
        def move_out(self, tensors: Any) -> None:
            moves.append(f"out: {', '.join(tensors)}")

        def move_in(self, tensors: Any) -> None:
            moves.append(f"in: {', '.join(tensors)}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.learning.shared.optimizer.HostMemory", Noted)
        optimizer = Optimizer(model, supervised(), num_steps=1, is_offloaded=True)
    optimizer.load_to_device()
    optimizer.offload()
    assert moves == ["out: master.0", "in: master.0", "out: master.0"]


def test_several_ranks_load_a_checkpoint_of_one_that_kept_a_weight_in_float32() -> None:
    """One rank has no master of it, and several name every weight as one; the policy's own tensor is the weight."""
    model = one_matrix(torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    cut = Optimizer(model, supervised(), num_steps=1, computes_in=torch.bfloat16)
    cut.load_tensors({})
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    alone = Optimizer(one_matrix(torch.bfloat16), supervised(), num_steps=1)
    with pytest.raises(KeyError, match=r"master\.0"):
        alone.load_tensors({})
