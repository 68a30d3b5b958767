"""Several trainers of one policy: who each is among the others, and which errors are whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from tasks.core.passing_faults import PassingFault
from tasks.core.settings import load
from tasks.models.settings import LaunchSettings
from tasks.pipeline.launch import (
    Place,
    is_lost,
    own_gpu,
    place_of,
    refuse_equal_gpus,
    told_once_per_node,
)
from tasks.pipeline.order import CommonSections, run_stage
from tasks.pipeline.outer_launcher import LAUNCH
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


def test_a_mistake_that_all_ranks_of_a_node_find_ends_each_with_1_and_the_first_tells_it() -> None:
    with pytest.raises(SystemExit) as ended, told_once_per_node(3):
        raise ValueError("params")
    assert ended.value.code == 1
    with pytest.raises(ValueError, match="params"), told_once_per_node(0):
        raise ValueError("params")


def test_what_may_pass_is_told_by_each_since_the_first_may_be_the_one_that_was_lost() -> None:
    with pytest.raises(PassingFault, match="did not meet"), told_once_per_node(3):
        raise PassingFault("did not meet")


def stage_with(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    run_stage("train")


def test_only_ranks_that_somebody_else_started_leave_a_mistake_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single trainer in a task of Slurm's is number 1 of its node too, and nobody is there to tell it."""
    params = profile_params("test") | {"seed": "eleven"}
    with pytest.raises(ValueError, match="seed"):
        stage_with(yaml.safe_dump(params), tmp_path, monkeypatch)
    params["launch"] |= {"launcher": "external", "num_trainers": 2}
    with pytest.raises(SystemExit):
        stage_with(yaml.safe_dump(params), tmp_path, monkeypatch)
    monkeypatch.setenv(LAUNCH, "srun")  # this process will start the ranks
    with pytest.raises(ValueError, match="seed"):
        stage_with(yaml.safe_dump(params), tmp_path, monkeypatch)


def test_params_that_nobody_can_read_are_told_by_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"params\.yaml"):
        stage_with("launch: {launcher: external", tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x' in the environment.*whole number"),
        ({"LOCAL_RANK": "", "SLURM_LOCALID": "1.5"}, "SLURM_LOCALID is '1.5'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ],
)
def test_a_place_that_is_no_number_is_refused_with_the_variables_name(variables: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        place_of(launch(), {**MEETING, **variables})
