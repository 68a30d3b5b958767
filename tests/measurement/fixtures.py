"""A finished run for the measurement tests: made up, complete, and small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.core.settings import Paths
from tests.measurement.synthetic import write_artifacts


@pytest.fixture
def finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Artifacts of a run whose best snapshot was promoted, under the working directory as a user has them."""
    monkeypatch.chdir(tmp_path)
    return write_artifacts(Path("artifacts"))


@pytest.fixture
def small_run(tmp_path: Path) -> Paths:
    """Eight snapshots on 22 problems, two optimizer steps an iteration; the best one was promoted."""
    return write_artifacts(tmp_path / "artifacts", problems_per_type=2)
