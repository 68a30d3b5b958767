"""A run on two ranks against one: the same first batch, the same step, and snapshots that anyone can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.files import read_jsonl
from tasks.core.settings import Paths
from tasks.learning.shared.ranks import ALONE
from tasks.models.folders import is_adapter, load_model
from tasks.models.settings import on_cpu
from tasks.stages.train.policy import refuse_cut
from tasks.stages.train.settings import TrainSections
from tasks.stages.train.stage import run
from tests import tiny
from tests.engine_benches import vllm_settings
from tests.ranks import RankProcesses
from tests.stages.train.rank_runs import RUNS, settings, train_runs, write_sent

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


def test_two_ranks_send_servers_what_one_sends_them(two_ranks: RankProcesses, tmp_path: Path) -> None:
    """The same tensors in the same order, the tied head among them; on rank 0 in host memory, from where each goes to
    its GPU.
    """
    start = str(tiny.model_folder(tmp_path / "start"))
    write_sent(ALONE, start, str(tmp_path / "1"))
    two_ranks.call(write_sent, start, str(tmp_path / "2"))
    one, two = (torch.load(tmp_path / size, weights_only=True) for size in ("1", "2"))
    assert list(one) == list(two) and len(one) == 25  # 2 layers of 11, embedding, norm, head
    assert {tensor.dtype for tensor in two.values()} == {torch.bfloat16}
    assert all(torch.equal(one[name], two[name]) for name in one)


def refuse(changed: TrainSections, *, num_here: int = 2, num_gpus: int = 0) -> None:
    refuse_cut(changed, 2, num_here=num_here, num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"offload": "optimizer"}, "2 ranks train one policy, and compute.offload is optimizer"),
        ({"weights": "bfloat16"}, "compute.weights is bfloat16 and compute.frozen float32.*Set compute.frozen to bfl"),
    ],
)
def test_what_a_policy_that_is_cut_cannot_do_is_refused_with_the_remedy(changed: dict[str, str], found: str) -> None:
    given = settings("adapter, ahead")
    with pytest.raises(ValueError, match=found):
        refuse(given.model_copy(update={"compute": given.compute.model_copy(update=changed)}))


def over_vllm(folder: Path, **changed: Any) -> TrainSections:
    given = settings("full")
    own = vllm_settings(folder, **changed)
    return given.model_copy(update={"engine": given.engine.model_copy(update={"name": "vllm", "settings": own})})


def test_trainers_and_servers_have_a_gpu_each_or_are_refused(tmp_path: Path) -> None:
    """Two trainers have the first two GPUs, two servers of one the last two; servers elsewhere ask for none."""
    two = over_vllm(tmp_path, mode="server", num_servers=2)
    refuse(two, num_gpus=4)
    refuse(two)  # on processors
    refuse(two, num_here=1, num_gpus=3)  # the other one is on another node
    with pytest.raises(ValueError, match=r"2 trainers and 2 servers .* ask for 4 GPUs of .* which has 3, .*Lower"):
        refuse(two, num_gpus=3)
    refuse(over_vllm(tmp_path, mode="server", num_servers=2, urls=["http://127.0.0.1:8000"]), num_gpus=2)


def test_one_trainer_whose_gpu_a_server_would_take_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is trained, a server may have the only GPU: the model beside it is a short probe."""
    monkeypatch.setattr("tasks.models.torch_setup.num_gpus", lambda compute: 1)
    with pytest.raises(ValueError, match=r"1 trainer and 1 server .* which has 1, .*mode: in_process"):
        run(over_vllm(tmp_path, mode="server"), Paths(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_what_vllm_cannot_do_beside_several_trainers_is_refused_with_the_remedy(tmp_path: Path) -> None:
    refuse(over_vllm(tmp_path), num_gpus=2)
    refuse(over_vllm(tmp_path, mode="server", transfer="nccl"), num_gpus=4)
    with pytest.raises(ValueError, match=r"transfer is ipc, .*Set engine\.settings\.transfer to disk.*nccl"):
        refuse(over_vllm(tmp_path, transfer="ipc"), num_gpus=4)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2 in process.*engine\.settings\.mode to s"):
        refuse(over_vllm(tmp_path, tensor_parallel_size=2), num_gpus=4)
