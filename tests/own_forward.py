"""Engines that step by the model's own forward, as where there is no compiler, on a GPU, or for another family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tasks.engines.transformers import check


@contextmanager
def own_forward() -> Iterator[None]:
    """Of the engines that are opened inside."""
    with mock.patch.object(check, "fits", return_value=False), mock.patch.object(check, "_checked", {}):
        yield
