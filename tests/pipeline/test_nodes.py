"""Several trainers of one policy as processes of this machine: how they are started, meet, and die."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.core.files import content_hash, read_jsonl
from tests.conftest import ROOT
from tests.infra.slurm import SRUN, allocation, stand_ins
from tests.pipeline.prefect_api import free_port
from tests.pipeline.project import Project
from tests.pipeline.trainable import make_trainable

HOST, PYTHON = socket.gethostname(), sys.executable
KILLED_FIRST = """
import os
from pathlib import Path
from tasks.core.settings import load, read_params
from tasks.pipeline.cli_errors import one_line_errors
from tasks.pipeline.launch import joined, place_of
from tasks.pipeline.order import CommonSections

common = load(CommonSections, read_params())
place = place_of(common.launch, os.environ)
with one_line_errors(debug=False), joined(place, common.launch, common.compute, Path("artifacts")) as ranks:
    if ranks.leads:
        os.kill(os.getpid(), 9)
    ranks.await_start()
"""


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
    """Whose ranks were started by someone else. They wait a second, and not thirty, for a folder that is not shared."""
    project = copy_of(untrained, tmp_path_factory.mktemp("nodes") / "node", launcher="external", num_trainers=2)
    code = project.folder / "tasks" / "core" / "files.py"
    text = code.read_text(encoding="utf-8")
    assert "SHARED_SECONDS = 30.0" in text
    code.write_text(text.replace("SHARED_SECONDS = 30.0", "SHARED_SECONDS = 1.0"), encoding="utf-8")
    return project


def only_line(told: str) -> str:
    lines = told.strip().splitlines()
    assert len(lines) == 1, told
    return lines[0]


@pytest.fixture
def other(node: Project, tmp_path: Path) -> Project:
    """A second node, with a folder of its own. The two wait long enough to meet."""
    node.set_params({"launch.meet_seconds": 60.0})
    return copy_of(node, tmp_path / "other")


def refuse_each_other(node: Project, other: Project, difference: str, advice: str) -> None:
    """Both end with status 1 and one line: `difference`, a regular expression, and `advice`."""
    for status, told in nodes_of(node, other, port=free_port()):
        assert status == 1
        assert re.search(rf"{HOST} {difference}", only_line(told))
        assert advice in told


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
def test_a_node_with_other_params_is_one_line_on_each_node(node: Project, other: Project) -> None:
    other.set_params({"seed": 12})
    difference = rf"has seed of params.yaml \w{{8}} and not \w{{8}}, which {HOST} has"
    refuse_each_other(node, other, difference, "one params.yaml")


@pytest.mark.slow
def test_a_node_with_other_code_is_one_line_on_each_node(node: Project, other: Project) -> None:
    with (other.folder / "tasks" / "custom" / "any_text.py").open("a", encoding="utf-8") as file:
        file.write("# another line\n")
    refuse_each_other(node, other, rf"has tasks/ \w{{8}} and not \w{{8}}, which {HOST} has", "one checkout")


@pytest.mark.slow
def test_a_node_with_another_version_is_one_line_on_each_node(node: Project, other: Project) -> None:
    """The other one imports a site that calls its torch 0.0."""
    (other.folder / "torch-0.0.dist-info").mkdir()
    (other.folder / "torch-0.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 0.0\n", encoding="utf-8")
    difference = re.escape(f"has torch 0.0 and not {metadata.version('torch')}")
    refuse_each_other(node, other, difference, "Install the same lock on every node")


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_one_line_on_each_node(node: Project, other: Project) -> None:
    difference = re.escape(f"does not see {node.artifacts} of {HOST}")
    refuse_each_other(node, other, difference, "storage that all nodes share")


@pytest.mark.slow
def test_a_rank_whose_nodes_first_was_killed_tells_that_it_lost_it(node: Project) -> None:
    node.set_params({"launch.meet_seconds": 60.0})
    (node.folder / "killed_first.py").write_text(KILLED_FIRST, encoding="utf-8")
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [node.start("killed_first", variables={**meeting, **place}) for place in places]
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-9, 75]
    assert f"rank 1 of 2 on {HOST} lost another one" in only_line(told[1])


@pytest.mark.slow
def test_a_mistake_in_params_is_told_by_the_first_rank_of_a_node_alone(untrained: Project, tmp_path: Path) -> None:
    """Slurm's variables: four ranks on two nodes."""
    project = copy_of(untrained, tmp_path / "four", launcher="external", num_trainers=5)
    places = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NTASKS": "4"} for rank in range(4)]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [project.start("tasks", "train", variables={**meeting, **place}) for place in places]
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1, 1, 1]
    assert told[1] == told[3] == ""
    assert "launch.num_trainers is 5, and 4 processes were started" in only_line(told[0])
    assert told[2] == told[0]


@pytest.fixture(scope="module")
def both(untrained: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Trained by two."""
    project = on_two(untrained, tmp_path_factory.mktemp("ranks") / "both")
    assert train(project).stdout.count("results are in") == 1
    return project


def metrics(project: Project) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(project.artifacts / "train" / "metrics.jsonl")]


@pytest.mark.rank_drill
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


@pytest.mark.rank_drill
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


@pytest.mark.rank_drill
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


@pytest.mark.rank_drill
def test_torchrun_on_two_nodes_trains_what_two_ranks_train(untrained: Project, both: Project, tmp_path: Path) -> None:
    """infra/launch/torchrun.sh, once per node."""
    project = on_two(untrained, tmp_path / "nodes", launcher="external")
    command = [str(ROOT / "infra" / "launch" / "torchrun.sh"), "2", "1", f"127.0.0.1:{free_port()}"]
    nodes = [
        subprocess.Popen(command, cwd=project.folder, env=project.environment(), stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [node.communicate(timeout=600)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert content_hash(project.artifacts / "train") == content_hash(both.artifacts / "train")


@pytest.mark.rank_drill
def test_a_job_of_slurm_trains_what_two_ranks_train(untrained: Project, both: Project, tmp_path: Path) -> None:
    """infra/launch/slurm.sh with an srun of our own on two nodes of a GPU each, and `tasks train` in place of the flow,
    which calls it. The job's own step has a task's variables too.
    """
    project = on_two(untrained, tmp_path / "job", launcher="external")
    variables = {**project.environment(), **allocation(tmp_path, nodes=["127.0.0.1", "localhost"], per_node=1)}
    stand_ins(tmp_path, srun=SRUN, python=f'[[ $* == "-m flows run" ]] && set -- -m tasks train\n{PYTHON} "$@"')
    done = subprocess.run(
        [ROOT / "infra" / "launch" / "slurm.sh"],
        cwd=project.folder,
        env={**variables, "SERVERS": "no", "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results are in") == 1
    assert content_hash(project.artifacts / "train") == content_hash(both.artifacts / "train")
