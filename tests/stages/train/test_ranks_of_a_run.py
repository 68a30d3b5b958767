"""A run on two ranks against one: the same first batch, the same step, and snapshots that anyone can load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.core.files import read_jsonl
from tasks.learning.shared.ranks import ALONE
from tasks.models.folders import is_adapter, load_model
from tasks.models.settings import on_cpu
from tasks.stages.train.policy import refuse_cut
from tests import tiny
from tests.ranks import RankProcesses
from tests.stages.train.rank_runs import RUNS, settings, train_runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(two_ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    start = str(tiny.model_folder(folder / "start"))
    train_runs(ALONE, start, str(folder / "1"))
    two_ranks.call(train_runs, start, str(folder / "2"))
    return {size: folder / str(size) for size in (1, 2)}


@pytest.mark.parametrize("name", RUNS)
def test_the_first_iteration_is_that_of_one_rank(trained: dict[int, Path], name: str) -> None:
    """The engine of rank 0 has the whole policy, so it draws the same tokens; loss and gradient are sums over both."""
    one, two = ([row for _, row in read_jsonl(place / name / "metrics.jsonl")] for place in trained.values())
    assert len(one) == len(two) == 2
    assert two[0]["mean_reward"] == one[0]["mean_reward"]
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-5)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-4)
    assert two[1]["kl"] > 0


@pytest.mark.parametrize("name", RUNS)
def test_a_snapshot_is_a_plain_model_folder_with_the_weights_of_both(trained: dict[int, Path], name: str) -> None:
    """AdamW's first step moves every weight by the rate, whatever its gradient: what is near 0 may go either way."""
    first, second = (place / name / "snapshots" / "iteration-0001" for place in trained.values())
    assert sorted(item.name for item in second.iterdir()) == sorted(item.name for item in first.iterdir())
    assert is_adapter(second) == name.startswith("adapter")
    one, two = (load_model(folder, compute=on_cpu(1)).state_dict() for folder in (first, second))
    differences = torch.cat([(one[key] - two[key]).abs().flatten() for key in one])
    assert differences.quantile(0.99) < 1e-5


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (
            {"offload": "optimizer"},
            "2 ranks train one policy, and compute.offload is optimizer",
        ),
        ({"weights": "bfloat16"}, "compute.weights is bfloat16 and compute.frozen float32.*Set compute.frozen to bfl"),
    ],
)
def test_what_a_policy_that_is_cut_cannot_do_is_refused_with_the_remedy(changed: dict[str, str], found: str) -> None:
    given = settings("adapter, ahead")
    with pytest.raises(ValueError, match=found):
        refuse_cut(given.model_copy(update={"compute": given.compute.model_copy(update=changed)}), 2)
