"""Several trainers of one policy: who they are, how they are started, and what happens when one dies."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tasks.core.files import content_hash, read_jsonl
from tasks.core.settings import load
from tasks.models.settings import LaunchSettings
from tasks.pipeline.launch import Place, is_lost, own_gpu, place_of, refuse_equal_gpus
from tasks.pipeline.order import CommonSections
from tests.pipeline.prefect_api import free_port
from tests.pipeline.project import Project
from tests.pipeline.trainable import make_trainable
from tests.profiles import profile_params

MEETING = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
HOST = socket.gethostname()


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


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_trainable(tmp_path_factory.mktemp("ranks") / "untrained")


def copy_of(untrained: Project, folder: Path, **changed: Any) -> Project:
    shutil.copytree(untrained.folder, folder)
    project = Project(folder)
    project.set_params({f"launch.{name}": value for name, value in changed.items()})
    return project


def on_two(untrained: Project, folder: Path, **changed: Any) -> Project:
    return copy_of(untrained, folder, **{"launcher": "torchrun", "num_trainers": 2, **changed})


def train(project: Project) -> subprocess.CompletedProcess[str]:
    result = project.run("tasks", "train")
    assert result.returncode == 0, result.stderr
    return result


def nodes_of(*projects: Project, port: int, size: int = 2) -> list[tuple[int, str]]:
    """One rank per project, of `size`, each with its own command; the status and what it told, of each."""
    meeting = {"WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        project.start("tasks", "train", variables={**meeting, "RANK": str(rank)})
        for rank, project in enumerate(projects)
    ]
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    for project in projects:
        assert not project.processes()
        assert not project.leftovers() and not list(project.artifacts.glob(".ranks-*"))
        assert not (project.artifacts / "train").exists()
    return [(rank.returncode, text) for rank, text in zip(ranks, told, strict=True)]


@pytest.fixture(scope="module")
def node(untrained: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Whose ranks were started by someone else."""
    return copy_of(untrained, tmp_path_factory.mktemp("nodes") / "node", launcher="external", num_trainers=2)


def only_line(told: str) -> str:
    lines = told.strip().splitlines()
    assert len(lines) == 1, told
    return lines[0]


@pytest.mark.slow
def test_a_port_in_use_is_one_line_with_the_port(node: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [(status, told)] = nodes_of(node, port=port)
    assert status == 75
    assert f"the port of 127.0.0.1:{port} is in use (rank 0, on {HOST}" in only_line(told)
    assert "Export another MASTER_PORT" in told


@pytest.mark.slow
def test_a_rank_that_nobody_meets_gives_up_in_time_with_one_line(node: Project) -> None:
    node.set_params({"launch.meet_seconds": 2.0})
    port = free_port()
    [(status, told)] = nodes_of(node, port=port)
    assert status == 75
    assert f"the 2 ranks did not meet at 127.0.0.1:{port} within 2 s (rank 0, on {HOST}" in only_line(told)
    assert "launch.meet_seconds" in told


@pytest.mark.slow
def test_a_node_with_other_params_is_one_line_on_each_node(node: Project, tmp_path: Path) -> None:
    node.set_params({"launch.meet_seconds": 60.0})
    other = copy_of(node, tmp_path / "other")
    other.set_params({"seed": 12})
    for status, told in nodes_of(node, other, port=free_port()):
        assert status == 1
        assert re.search(rf"{HOST} has seed of params.yaml \w{{8}} and not \w{{8}}, which {HOST} has", only_line(told))
        assert "one params.yaml" in told


@pytest.mark.slow
def test_a_node_with_other_code_is_one_line_on_each_node(node: Project, tmp_path: Path) -> None:
    node.set_params({"launch.meet_seconds": 60.0})
    other = copy_of(node, tmp_path / "other")
    with (other.folder / "tasks" / "custom" / "any_text.py").open("a", encoding="utf-8") as file:
        file.write("# another line\n")
    for status, told in nodes_of(node, other, port=free_port()):
        assert status == 1
        assert re.search(rf"{HOST} has tasks/ \w{{8}} and not \w{{8}}, which {HOST} has", only_line(told))
        assert "one checkout" in told


@pytest.mark.slow
def test_a_node_with_another_version_is_one_line_on_each_node(node: Project, tmp_path: Path) -> None:
    """The other one imports a site that calls its torch 0.0."""
    node.set_params({"launch.meet_seconds": 60.0})
    other = copy_of(node, tmp_path / "other")
    (other.folder / "torch-0.0.dist-info").mkdir()
    (other.folder / "torch-0.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 0.0\n", encoding="utf-8")
    for status, told in nodes_of(node, other, port=free_port()):
        assert status == 1
        assert f"{HOST} has torch 0.0 and not {metadata.version('torch')}" in only_line(told)
        assert "Install the same lock on every node" in told


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_one_line_on_each_node(node: Project, tmp_path: Path) -> None:
    node.set_params({"launch.meet_seconds": 10.0})
    other = copy_of(node, tmp_path / "other")
    for status, told in nodes_of(node, other, port=free_port()):
        assert status == 1
        assert f"{HOST} does not see {node.artifacts} of {HOST}" in only_line(told)
        assert "storage that all nodes share" in told


@pytest.fixture(scope="module")
def both(untrained: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Trained by two."""
    project = on_two(untrained, tmp_path_factory.mktemp("ranks") / "both")
    assert train(project).stdout.count("results are in") == 1
    return project


def metrics(project: Project) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(project.artifacts / "train" / "metrics.jsonl")]


@pytest.mark.demo
def test_one_command_trains_on_two_ranks_what_one_trains(untrained: Project, both: Project, tmp_path: Path) -> None:
    """Of the later iterations nothing is said: the last digits of weights differ, and so may a token that is drawn."""
    alone = copy_of(untrained, tmp_path / "alone")
    train(alone)
    one, two = metrics(alone), metrics(both)
    assert len(one) == len(two) == 8
    assert two[0]["mean_reward"] == one[0]["mean_reward"] > 0
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-5)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-4)
    names = [
        sorted(item.name for item in (place.artifacts / "train" / "snapshots").iterdir()) for place in (alone, both)
    ]
    assert names[0] == names[1] == ["iteration-0004", "iteration-0008"]


def rank_process(project: Project, rank: int) -> psutil.Process | None:
    for process in project.processes():
        try:
            if process.cmdline()[-3:] == ["-m", "tasks", "train"] and process.environ().get("RANK") == str(rank):
                return process
        except psutil.Error:
            continue
    return None


@pytest.mark.demo
@pytest.mark.parametrize("rank", [0, 1])
def test_after_kill_9_of_a_rank_all_start_again_and_end_bitwise_as_if_nothing_had_happened(
    untrained: Project, both: Project, tmp_path: Path, rank: int
) -> None:
    project = on_two(untrained, tmp_path / "killed", max_restarts=1)
    run = project.start("tasks", "train")
    checkpoints = project.artifacts / ".resume" / "train"
    deadline = time.monotonic() + 300
    while not list(checkpoints.glob("*/iteration-*/manifest.json")):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.05)
    process = rank_process(project, rank)
    assert process is not None
    process.kill()
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    assert f"rank {rank} of 2 was ended by signal 9, so all were ended; starting again" in errors
    assert "continuing after iteration" in errors
    assert content_hash(project.artifacts / "train") == content_hash(both.artifacts / "train")
    assert not project.processes()


@pytest.mark.demo
def test_without_a_restart_left_a_death_is_one_line_with_the_status_of_what_may_pass(
    untrained: Project, tmp_path: Path
) -> None:
    project = on_two(untrained, tmp_path / "ended")
    run = project.start("tasks", "train")
    deadline = time.monotonic() + 300
    while (process := rank_process(project, 1)) is None or not list((project.artifacts / ".resume").glob("train/*/i*")):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.05)
    process.kill()
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 75
    lines = [line for line in errors.splitlines() if "error" in line]
    assert len(lines) == 1 and "train: rank 1 of 2 was ended by signal 9" in lines[0] and "max_restarts" in lines[0]
    assert not project.processes()


@pytest.mark.demo
def test_two_agents_of_torchrun_are_two_nodes(untrained: Project, both: Project, tmp_path: Path) -> None:
    project = on_two(untrained, tmp_path / "nodes", launcher="external")
    agent = (
        "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}", "-m", "tasks", "train",
    )  # fmt: skip
    nodes = [project.start(*agent) for _ in range(2)]
    said = [node.communicate(timeout=600)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert content_hash(project.artifacts / "train") == content_hash(both.artifacts / "train")
