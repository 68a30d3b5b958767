"""Attention of packed trees in C: torch's numbers, the same bits each time, and torch itself where C cannot be had."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tasks.models import attention, tree_attention
from tasks.models.attention import TreePlan
from tasks.models.native.compiled import load_library
from tasks.models.scored_attention import FUSED, choose_kernel
from tasks.models.tree_attention import Branch

CPU = torch.device("cpu")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
needs_compiler = pytest.mark.skipif(tree_attention.native_library() is None, reason="no compiler")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def grow(seed: int, *, num_branches: int, longest: int) -> list[Branch]:
    """A tree whose branches leave any earlier one anywhere, some with one token, some deep."""
    rng = random.Random(seed)
    branches: list[Branch] = []
    size = 0
    for number in range(num_branches):
        parent = rng.choice(branches).path if number else np.empty(0, np.int64)
        prefix = parent[: rng.randint(1, len(parent))] if number else parent
        num_new = rng.choice((1, rng.randint(1, longest), longest))
        branches.append(Branch(size, num_new, np.concatenate([prefix, np.arange(size, size + num_new)])))
        size += num_new
    return branches


def beside(one: list[Branch], other: list[Branch]) -> list[Branch]:
    """Both trees in one row."""
    size = sum(branch.num_new for branch in one)
    return one + [Branch(branch.start + size, branch.num_new, branch.path + size) for branch in other]


def inputs(branches: list[Branch], *, keys: int, group: int, size: int, value_size: int | None = None) -> list[Tensor]:
    """Query, key, value and the output's gradient, with the strides that a model gives them."""
    generator, length = torch.Generator().manual_seed(size), sum(branch.num_new for branch in branches)
    value_size = value_size or size
    shapes = ((keys * group, size), (keys, size), (keys, value_size))
    query, key, value = (torch.randn(1, length, *shape, generator=generator).transpose(1, 2) for shape in shapes)
    return [query, key, value, torch.randn(1, length, keys * group, value_size, generator=generator)]


def results(attend: Attend, given: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in given[:3])
    output = attend(query, key, value)
    output.backward(given[3])
    found = [output.detach(), query.grad, key.grad, value.grad]
    assert all(tensor is not None for tensor in found)
    return [tensor for tensor in found if tensor is not None]


def in_c(branches: list[Branch]) -> Attend:
    table = tree_attention.BranchTable(branches)
    return lambda query, key, value: tree_attention.attend_natively(query, key, value, 0.2, table)


def by_torch(branches: list[Branch]) -> Attend:
    plan = TreePlan(branches, device=CPU)
    return lambda query, key, value: plan._in_calls(query, key, value, 0.2, FUSED)


def densely(branches: list[Branch]) -> Attend:
    """All scores of the row in float64, those hidden that no path contains."""
    length = sum(branch.num_new for branch in branches)
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64)
    for branch in branches:
        for number in range(branch.num_new):
            mask[branch.start + number, branch.path[: len(branch.path) - branch.num_new + number + 1]] = 0

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        weights = (query.double() @ key.double().transpose(-1, -2) * 0.2 + mask).softmax(-1)
        return (weights @ value.double()).transpose(1, 2).float()

    return attend


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """To 1e-5 of each tensor's largest entry: gradients of keys are sums over all that see them."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("size", [8, 20, 32, 64])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_output_and_gradients_are_those_of_torch_and_of_a_dense_softmax(seed: int, group: int, size: int) -> None:
    branches = grow(seed, num_branches=(1, 3, 8, 12)[seed], longest=(90, 1, 40, 70)[seed])
    given = inputs(branches, keys=2, group=group, size=size)
    found = results(in_c(branches), given)
    assert_close(found, results(densely(branches), given))
    assert_close(found, results(by_torch(branches), given))


@needs_compiler
def test_values_may_have_another_size_than_keys_and_a_group_may_fill_a_whole_block() -> None:
    branches = grow(5, num_branches=6, longest=30)
    for group in (5, 32):
        given = inputs(branches, keys=1, group=group, size=24, value_size=12)
        assert_close(results(in_c(branches), given), results(densely(branches), given))


@needs_compiler
def test_large_scores_overflow_nowhere() -> None:
    """Scores of some hundreds: their exponentials alone would be infinite, and their last digits are 1e-5 apart."""
    branches = grow(6, num_branches=5, longest=50)
    query, *rest = inputs(branches, keys=2, group=2, size=32)
    given = [200 * query, *rest]
    found = results(in_c(branches), given)
    torch.testing.assert_close(found[0], results(densely(branches), given)[0], rtol=0, atol=1e-3)
    assert all(tensor.isfinite().all() for tensor in found)


@needs_compiler
def test_a_number_that_is_none_is_passed_on() -> None:
    branches = [Branch(0, 20, np.arange(20))]
    query, key, value, _ = inputs(branches, keys=1, group=2, size=16)
    query[0, 0, 3] = float("nan")
    output = in_c(branches)(query, key, value)[0]
    assert output[3, 0].isnan().all() and output.isnan().sum() == 16


@needs_compiler
def test_bits_depend_neither_on_threads_nor_on_what_else_is_in_the_row() -> None:
    one, other = grow(8, num_branches=8, longest=60), grow(9, num_branches=3, longest=25)
    size = sum(branch.num_new for branch in one)
    given = inputs(beside(one, other), keys=3, group=2, size=32)
    found = results(in_c(beside(one, other)), given)
    for num_threads in (1, 2, 8):
        torch.set_num_threads(num_threads)
        assert all(map(torch.equal, found, results(in_c(beside(one, other)), given)))
    alone = results(in_c(one), [*(tensor[:, :, :size] for tensor in given[:3]), given[3][:, :size]])
    assert torch.equal(alone[0], found[0][:, :size])
    assert all(torch.equal(short, long[:, :, :size]) for short, long in zip(alone[1:], found[1:], strict=True))


@needs_compiler
@pytest.mark.parametrize("width", [8, 16])
def test_another_width_of_vectors_gives_the_same_numbers(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    branches = grow(10, num_branches=8, longest=60)
    given = inputs(branches, keys=2, group=3, size=40)
    library = load_library("tree_attention", f"WIDTH={width}")
    assert library is not None
    monkeypatch.setattr(tree_attention, "native_library", lambda: library)
    assert_close(results(in_c(branches), given), results(densely(branches), given))


@needs_compiler
def test_gradients_go_to_those_who_want_one_through_a_checkpoint_too_and_have_none_of_their_own() -> None:
    branches = grow(11, num_branches=4, longest=30)
    query, key, value, slope = inputs(branches, keys=2, group=2, size=16)
    whole = results(in_c(branches), [query, key, value, slope])
    value.requires_grad_()
    output = checkpoint(in_c(branches), query, key, value, use_reentrant=False)
    output.backward(slope)
    assert torch.equal(output, whole[0]) and value.grad is not None and torch.equal(value.grad, whole[3])
    assert query.grad is None and key.grad is None
    with torch.no_grad():
        assert torch.equal(in_c(branches)(query, key.contiguous(), value), whole[0])
    slope.requires_grad_()
    (gradient,) = torch.autograd.grad((in_c(branches)(query, key, value) * slope).sum(), value, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@needs_compiler
def test_floats_that_lie_apart_and_a_gradient_that_is_one_number_are_read_as_they_are() -> None:
    branches = grow(12, num_branches=4, longest=30)
    given = inputs(branches, keys=2, group=2, size=16)
    given[3] = torch.tensor(0.5).expand_as(given[3])
    apart = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in given[:3]]
    assert apart[0].stride(-1) != 1
    found, expected = results(in_c(branches), [*apart, given[3]]), results(densely(branches), given)
    assert_close(found, expected)


@pytest.mark.parametrize("reason", ["library", "dtype", "kernel", "threads"])
def test_torch_attends_where_c_does_not(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    branches = grow(13, num_branches=5, longest=20)
    query, key, value, _ = inputs(branches, keys=2, group=2, size=16)
    kernel, dtype = FUSED, torch.float32
    if reason == "library":
        monkeypatch.setattr(tree_attention, "native_library", lambda: None)
    elif reason == "dtype":
        dtype = torch.float64
    elif reason == "kernel":
        kernel = choose_kernel(softcap=1e6, sinks_H=None)
    else:
        torch.set_num_threads(5)  # more than twice the key heads
    monkeypatch.setattr(attention, "attend_natively", lambda *_: pytest.fail("C attends"))
    plan = TreePlan(branches, device=CPU)
    found = plan.attend(query.to(dtype), key.to(dtype), value.to(dtype), 0.2, kernel)
    torch.testing.assert_close(found.float(), densely(branches)(query, key, value), rtol=1e-4, atol=1e-5)


@needs_compiler
def test_a_plan_for_c_makes_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = grow(14, num_branches=5, longest=20)
    monkeypatch.setattr(attention, "_alike", lambda *_: pytest.fail("torch's calls are planned"))
    query, key, value, _ = inputs(branches, keys=2, group=2, size=16)
    TreePlan(branches, device=CPU).attend(query, key, value, 0.2)
