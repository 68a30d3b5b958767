"""What attention and layers in C gain an update of the demo's model. Prints quartiles; no figure fails a test."""

from __future__ import annotations

import pytest

from tasks.models.tree_attention import native_library
from tests.benchmarks import update

pytestmark = pytest.mark.bench


@pytest.mark.skipif(native_library() is None, reason="no compiler")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_update_with_attention_or_layers_in_c_against_one_by_torch(num_threads: int) -> None:
    found = update.measure(num_threads, rounds=12)
    for name, quartiles in found.items():
        print(f"{num_threads} threads, {name}: {' '.join(f'{value:.3f}' for value in quartiles)}")
    assert all(value > 0 for quartiles in found.values() for value in quartiles)
