"""Statistics of differences between log-probs, and what each dtype allows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from tasks.models.architecture import check_own_forward
from tasks.models.differences import Differences, tolerance_of


def test_mean_quantiles_and_largest_are_of_absolute_differences():
    """99 tokens off by 0.01 either way and one by 1: the mean is (0.99 + 1) / 100."""
    found = Differences.of([*[0.01, -0.01] * 49, 0.01, -1.0])
    assert (round(found.mean, 6), found.median, found.p99, found.max, found.num_tokens) == (0.0199, 0.01, 1.0, 1.0, 100)


def test_nan_counts_as_infinite_and_nothing_as_no_difference():
    found = Differences.of([0.0] * 200 + [float("nan")])
    assert (found.mean, found.median, found.max) == (float("inf"), 0.0, float("inf"))
    assert not found.is_within(tolerance_of("bfloat16"))
    assert Differences.of([]).is_within(tolerance_of("float32"))


def test_the_coarsest_dtype_decides_and_an_unknown_one_counts_as_bfloat16():
    assert tolerance_of("float32", "bfloat16") == tolerance_of("bfloat16") == tolerance_of("float32", "auto")
    assert tolerance_of("float32").mean < tolerance_of("float16").mean < tolerance_of("bfloat16").mean


def test_each_of_mean_99th_percentile_and_largest_has_a_bound_of_its_own():
    """In bfloat16: mean 0.1, 99th percentile 0.8, largest 4."""
    tolerance = tolerance_of("bfloat16")
    assert Differences.of([0.09] * 1000 + [3.9]).is_within(tolerance)
    assert not Differences.of([0.11] * 1000).is_within(tolerance)
    assert not Differences.of([0.0] * 980 + [1.0] * 20).is_within(tolerance)
    assert not Differences.of([0.0] * 1000 + [4.1]).is_within(tolerance)


def test_a_machine_that_cannot_compile_is_not_told_to_take_another_model():
    """As Triton says it without gcc; a fault of the GPU itself passes as it is."""
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"), dtype=torch.float32, device=torch.device("cpu"))

    def check(error: Exception) -> None:
        def gaps() -> list[float]:
            raise error

        check_own_forward(model, gaps, who="the trainer", harm="", remedy="Use another architecture.")

    with pytest.raises(ValueError, match=r"could not compile what the trainer .*no compiler.*Install gcc") as told:
        check(TorchDynamoException("no compiler"))
    assert "architecture" not in str(told.value)
    with pytest.raises(ValueError, match=r"cannot run this architecture .*Use another architecture"):
        check(RuntimeError("no such shape"))
    with pytest.raises(torch.AcceleratorError):
        check(torch.AcceleratorError("an illegal memory access"))
