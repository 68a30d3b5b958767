"""When the ranks beside rank 0 load the policy, and which."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.learning.shared import whole_policy
from tasks.learning.shared.ranks import Ranks
from tasks.models.folders import weights_hash
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


def test_a_rank_that_sees_other_weights_than_rank_0_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_policy, "SHARED_SECONDS", 0.0)
    tiny.model_folder(tmp_path)
    with pytest.raises(ValueError, match=r"has the weights \w{8} on \S+ and 12345678 on rank 0's machine.*share"):
        follow_leader(settings("full"), tmp_path, Called("1234567890"))


def test_a_rank_waits_for_weights_that_rank_0_wrote_a_moment_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's folder lags: first it is not there, then its weights are not, then they are."""
    start, written = tmp_path / "seen", tmp_path / "written"
    tiny.model_folder(written)
    weights, left = weights_hash(written), sorted(written.iterdir(), key=lambda file: file.suffix == ".safetensors")

    def appear(seconds: float) -> None:
        start.mkdir(exist_ok=True)
        file = left.pop(0)
        (start / file.name).write_bytes(file.read_bytes())

    # Of this module alone: the thread that watches the heap sleeps too.
    monkeypatch.setattr(whole_policy, "time", SimpleNamespace(sleep=appear, monotonic=time.monotonic))
    whole_policy.refuse_other_weights(start, weights)
    assert not left
