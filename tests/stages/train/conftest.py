"""What several files of this folder train: a tiny untrained model, and a reward that it can earn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.stages.train import groups as grouping
from tests import tiny


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model_folder(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def earnable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model earns the reward of any text."""
    monkeypatch.setattr(grouping, "reward", tiny.reward_of_any_text)
