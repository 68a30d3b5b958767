"""When the ranks beside rank 0 load the policy, and which."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.learning.shared.ranks import Ranks
from tasks.stages.train.policy import follow_leader
from tests import tiny
from tests.stages.train.rank_runs import settings


class Called(Ranks):
    """A rank that rank 0 calls with these weights."""

    def __init__(self, weights: str | None):
        super().__init__()
        self.weights = weights

    def await_start(self) -> str | None:
        return self.weights


def test_a_rank_that_is_not_called_loads_nothing(tmp_path: Path) -> None:
    """Rank 0 may not have copied the model yet; or it ends before training."""
    follow_leader(settings("full"), tmp_path / "not copied yet", Called(None))


def test_a_rank_that_sees_other_weights_than_rank_0_refuses_them(tmp_path: Path) -> None:
    tiny.model_folder(tmp_path)
    with pytest.raises(ValueError, match=r"has the weights \w{8} on \S+ and 12345678 on rank 0's machine.*share"):
        follow_leader(settings("full"), tmp_path, Called("1234567890"))
