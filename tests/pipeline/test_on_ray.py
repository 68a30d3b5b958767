"""Ranks on a real cluster of Ray: what they train, and each way in which they end.

One cluster of two processors for the file, started as a person starts it; the head that is killed is that of a
command's own cluster.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.core.files import content_hash
from tasks.pipeline.ray_cluster import make_session_folder, reaches
from tests.pipeline import toy_training
from tests.pipeline.prefect_api import free_port
from tests.pipeline.project import Project
from tests.pipeline.test_nodes import copy_of, on_two, only_line, rank_process, train
from tests.pipeline.test_supervise import start, wait_for
from tests.pipeline.trainable import make_trainable

pytestmark = pytest.mark.flow
NUM_CPUS, LONGEST_SECONDS = 2, 600
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_trainable(tmp_path_factory.mktemp("ray") / "untrained")
    project.set_params({"compute.num_threads": 1, "train.num_iterations": 3, "train.snapshot_interval": 3})
    return project


@pytest.fixture(scope="module")
def address(untrained: Project) -> Iterator[str]:
    """Of the head."""
    port, folder = free_port(), make_session_folder()
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}"]
    command += [f"--num-cpus={NUM_CPUS}", "--include-dashboard=false", f"--temp-dir={folder}"]
    head = subprocess.Popen(
        command, env=untrained.environment() | TOKEN, stdout=subprocess.DEVNULL, start_new_session=True
    )
    while not reaches(f"127.0.0.1:{port}"):
        assert head.poll() is None
        time.sleep(0.2)
    yield f"127.0.0.1:{port}"
    family = psutil.Process(head.pid).children(recursive=True)
    head.kill()
    for process in family:
        process.kill()
    head.wait()
    shutil.rmtree(folder, ignore_errors=True)


def on_ray(untrained: Project, folder: Path, address: str | None, **changed: object) -> Project:
    project = copy_of(untrained, folder, **{"launcher": "ray", "num_trainers": 2, **changed})
    project.set_params({"launch.ray.address": address})
    project.server = TOKEN
    return project


@pytest.mark.rank_drill
def test_after_kill_9_of_a_rank_all_start_again_and_end_bitwise_as_under_torchrun_without_it(
    untrained: Project, address: str, tmp_path: Path
) -> None:
    project = on_ray(untrained, tmp_path / "killed", address, max_restarts=1)
    run = project.start("tasks", "train")
    while not list((project.artifacts / ".resume" / "train").glob("*/iteration-*/manifest.json")):
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    process = rank_process(project, 1)
    assert process is not None
    process.kill()
    output, errors = run.communicate(timeout=LONGEST_SECONDS)
    assert run.returncode == 0, errors
    assert "rank 1 of 2 was ended by signal 9, so all were ended; starting again" in errors
    assert "continuing after iteration" in errors
    assert output.count("results are in") == 1
    assert not project.processes() and not project.leftovers()
    both = on_two(untrained, tmp_path / "torchrun")
    train(both)
    assert content_hash(project.artifacts / "train") == content_hash(both.artifacts / "train")


def test_a_placement_that_cannot_be_met_is_one_line_with_what_was_asked_and_what_there_is(
    untrained: Project, address: str, tmp_path: Path
) -> None:
    project = on_ray(untrained, tmp_path / "three", address, num_trainers=3)
    project.set_params({"launch.ray.place_seconds": 3.0})
    done = project.run("tasks", "train")
    told = only_line(done.stderr)
    assert done.returncode == 1
    assert "asks Ray's cluster at" in told and "for 3 trainers of 1 CPU" in told and "has 2 CPU; 2 CPU free" in told
    assert "within 3 s (launch.ray.place_seconds)" in told and "lower launch.num_trainers" in told
    assert not project.processes()


def test_a_cluster_that_is_not_there_is_one_line(untrained: Project, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = on_ray(untrained, tmp_path / "none", address).run("tasks", "train")
    assert done.returncode == 75
    assert f"launch.ray.address is {address}, where nothing answers" in only_line(done.stderr)


@pytest.fixture(scope="module")
def toy(untrained: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """On a cluster of each command's own."""
    project = on_ray(untrained, tmp_path_factory.mktemp("ray") / "toy", None)
    shutil.copy(toy_training.__file__, project.folder / "tasks" / "stages" / "train" / "stage.py")
    return project


@pytest.mark.rank_drill
def test_a_mistake_that_all_ranks_find_is_told_once(toy: Project) -> None:
    process = start(toy, "mistake of all")
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 1
    assert errors == "error: the reward is no number, so nothing was learnt. Correct it.\n"
    assert not toy.processes()


@pytest.mark.rank_drill
def test_a_command_that_is_stopped_ends_as_one_without_ranks(toy: Project) -> None:
    process = start(toy, "long")
    wait_for([toy.folder / f"started-{rank}" for rank in range(2)], process)
    process.terminate()
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert (process.returncode, errors) == (143, "")
    assert not toy.processes()


def test_when_the_head_is_killed_the_command_ends_in_one_line_and_leaves_no_process(
    toy: Project, tmp_path: Path
) -> None:
    """Where TMPDIR is too long for Ray's sockets, and RAY_ADDRESS names no cluster."""
    long = tmp_path / ("deep" * 10)
    long.mkdir()
    toy.server = TOKEN | {"TMPDIR": str(long), "RAY_ADDRESS": "127.0.0.1:1"}
    process = start(toy, "long")
    wait_for([toy.folder / f"started-{rank}" for rank in range(2)], process)
    family = psutil.Process(process.pid).children(recursive=True)
    next(child for child in family if child.name() == "gcs_server").kill()
    _, errors = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 75
    assert "the head of Ray's cluster at" in only_line(errors) and "run the same command again" in errors
    assert not psutil.wait_procs(family, timeout=120)[1]
    assert not toy.processes()
