"""Several trainers of one policy: who each is among the others, and which errors are whose."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tasks.core.passing_faults import PassingFault
from tasks.core.settings import load
from tasks.models.settings import LaunchSettings
from tasks.pipeline.launch import Place, is_lost, own_gpu, place_of, refuse_equal_gpus, told_once_per_node
from tasks.pipeline.order import CommonSections
from tests.profiles import profile_params

MEETING = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def launch(**changed: Any) -> LaunchSettings:
    params = profile_params("test")
    params["launch"] |= {"launcher": "external", "num_trainers": 2, "meet_seconds": 60.0, **changed}
    return load(CommonSections, params).launch


def test_one_process_is_no_rank_whatever_its_environment_says() -> None:
    """A stage that another program's torchrun or Slurm's job starts is not mistaken for one of several."""
    assert place_of(launch(launcher="local", num_trainers=1), MEETING) is None
    assert place_of(launch(launcher="torchrun"), MEETING) is None


def test_a_rank_that_torchrun_started_knows_its_place() -> None:
    supervised = {**MEETING, "TORCHELASTIC_RUN_ID": "7"}
    assert place_of(launch(launcher="torchrun"), supervised) == Place(rank=1, size=2, local=1)
    assert place_of(launch(), MEETING) == Place(rank=1, size=2, local=1)


def test_slurms_variables_say_the_same() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "n", "MASTER_PORT": "1"}
    assert place_of(launch(), slurm) == Place(rank=1, size=2, local=0)


def test_external_ranks_without_a_place_to_meet_are_refused_with_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"no MASTER_ADDR and no MASTER_PORT in its environment.*srun with MASTER_"):
        place_of(launch(), {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"})


def test_another_number_of_processes_than_the_params_say_is_refused() -> None:
    with pytest.raises(ValueError, match=r"launch.num_trainers is 4, and 2 processes were started"):
        place_of(launch(num_trainers=4), MEETING)


def test_two_trainers_without_a_launcher_are_refused() -> None:
    with pytest.raises(ValueError, match=r"launch: num_trainers is 2 with launcher: local.*launcher to torch"):
        launch(launcher="local")


def test_each_rank_has_the_gpu_of_its_number_or_the_only_one_that_slurm_shows_it() -> None:
    assert own_gpu(Place(rank=5, size=8, local=1), 4) == 1
    assert own_gpu(Place(rank=5, size=8, local=1), 1) == 0
    with pytest.raises(ValueError, match=r"rank 3 is number 4 on \S+, where it sees 2 GPUs.*one rank per GPU there"):
        own_gpu(Place(rank=3, size=4, local=3), 2)


def test_two_ranks_with_one_gpu_are_refused_and_equal_numbers_on_two_machines_are_not() -> None:
    refuse_equal_gpus([("a", "1"), ("a", "2"), ("b", "1"), ("c", None), ("c", None)])
    with pytest.raises(ValueError, match=r"rank 1 and rank 2 have the same GPU of b \(7\).*--gpus-per-task=1"):
        refuse_equal_gpus([("a", "7"), ("b", "7"), ("b", "7")])


@pytest.mark.parametrize(
    "text",
    [
        "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4567",
        "[../gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:4567: Connection reset by peer",
        "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
    ],
)
def test_a_connection_that_closed_or_gave_no_answer_is_a_lost_rank(text: str) -> None:
    assert is_lost(RuntimeError(text))
    assert not is_lost(ValueError(text))


@pytest.mark.parametrize("changed", [{"launcher": "local", "num_trainers": 1}, {"launcher": "external"}])
def test_restarts_that_nobody_would_make_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_restarts is 2 with launcher: .*Set launch.max_restarts to 0"):
        launch(max_restarts=2, **changed)


def test_other_errors_of_the_ranks_libraries_are_mistakes() -> None:
    assert not is_lost(RuntimeError("gloo: unsupported dtype bfloat16"))
    assert not is_lost(dist.DistBackendError("NCCL error: invalid usage. Duplicate GPU detected: rank 1 and rank 0"))
    assert not is_lost(RuntimeError("the tool's connection timed out"))


@pytest.mark.parametrize(("error", "status"), [(ValueError("params"), 1), (PassingFault("ranks"), 75)])
def test_what_all_ranks_of_a_node_find_ends_each_with_its_status_and_the_first_tells_it(
    error: ValueError, status: int
) -> None:
    with pytest.raises(SystemExit) as ended, told_once_per_node(3):
        raise error
    assert ended.value.code == status
    with pytest.raises(type(error), match=str(error)), told_once_per_node(0):
        raise error
