"""Engines over small models step in C; some tests are about the model's own forward, which steps everywhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.own_forward import own_forward


@pytest.fixture
def _own_forward() -> Iterator[None]:
    with own_forward():
        yield
