"""Ranks that a command starts: how each end of theirs becomes one line and one status of the command."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tasks.core.files import read_json
from tasks.pipeline.supervise import Ending, cause_of, refuse_too_many
from tests.pipeline import toy_training
from tests.pipeline.project import Project
from tests.pipeline.trainable import make_trainable


def test_of_ranks_that_ended_the_one_that_was_killed_is_named() -> None:
    """Status 143 is what torch's SIGTERM makes of the ranks beside a dead one."""
    killed = Ending(1, -9)
    for other in (Ending(0, -15), Ending(0, 143), Ending(0, 75, "lost it", is_lost=True)):
        assert cause_of([other, killed]) == killed
    assert killed.describe(2) == "rank 1 of 2 was ended by signal 9"


def test_of_ranks_that_failed_the_first_is_named_that_lost_no_other() -> None:
    first, second = Ending(1, 75, "the server is gone", seconds=7), Ending(0, 75, "the disk is full", seconds=8)
    assert cause_of([Ending(2, 75, "lost it", seconds=6, is_lost=True), second, first]) == first
    assert first.describe(3) == "rank 1 of 3 ended with status 75 (the server is gone)"


def test_a_mistake_is_not_tried_again_and_a_death_is() -> None:
    assert Ending(0, 1).is_mistake
    assert not any(Ending(0, status).is_mistake for status in (143, -9, -15, 75))


def test_more_ranks_than_gpus_are_refused_and_processors_are_shared() -> None:
    refuse_too_many(4, 0)
    refuse_too_many(4, 4)
    with pytest.raises(ValueError, match=r"num_trainers is 3, and this machine has 2 GPUs.*num_trainers to 2 or fewer"):
        refuse_too_many(3, 2)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = make_trainable(tmp_path_factory.mktemp("ranks") / "toy")
    shutil.copy(toy_training.__file__, project.folder / "tasks" / "stages" / "train" / "stage.py")
    project.set_params({"launch.launcher": "torchrun", "launch.num_trainers": 2})
    return project


def start(toy: Project, case: str, *options: str) -> subprocess.Popen[str]:
    shutil.rmtree(toy.artifacts / "train", ignore_errors=True)
    for mark in toy.folder.glob("started-*"):
        mark.unlink()
    (toy.folder / "case").write_text(case, encoding="utf-8")
    return toy.start("tasks", "train", *options)


def end(toy: Project, case: str, *options: str) -> tuple[int, str]:
    process = start(toy, case, *options)
    _, errors = process.communicate(timeout=600)
    assert not toy.processes()
    return process.returncode, errors


@pytest.mark.flow
def test_a_mistake_that_all_ranks_find_is_told_once(toy: Project) -> None:
    told = "error: the reward is no number, so nothing was learnt. Correct it.\n"
    assert end(toy, "mistake of all") == (1, told)


@pytest.mark.flow
def test_an_error_of_one_rank_is_told_even_where_it_names_gloo(toy: Project) -> None:
    status, errors = end(toy, "error of one")
    assert status == 1
    assert errors == "error: RuntimeError: gloo has no such sum. Run again with --debug for the traceback.\n"


@pytest.mark.flow
def test_debug_and_accepted_drift_reach_the_ranks_and_show_their_tracebacks(toy: Project) -> None:
    status, errors = end(toy, "error of one", "--debug", "--accept-drift")
    assert status == 1
    assert 'raise RuntimeError("gloo has no such sum")' in errors
    assert (toy.folder / "options").read_text(encoding="utf-8") == "train --accept-drift --debug"


@pytest.mark.flow
def test_what_a_rank_starts_sees_nothing_of_the_ranks_meeting(toy: Project) -> None:
    """Else an engine's own group of processes would wait for torch's launcher."""
    assert end(toy, "child") == (0, "")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = read_json(toy.folder / "environment.json")
    assert not [name for name in environment if name in names or name.startswith("TORCHELASTIC_")]


@pytest.mark.flow
@pytest.mark.parametrize(
    ("number", "status", "told"),
    [(signal.SIGTERM, 143, ""), (signal.SIGINT, 130, "error: interrupted; nothing is left half-written.")],
)
def test_a_command_that_is_stopped_ends_as_one_without_ranks(
    toy: Project, number: signal.Signals, status: int, told: str
) -> None:
    process = start(toy, "long")
    marks = [toy.folder / f"started-{rank}" for rank in range(2)]
    wait_for(marks, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == status
    assert errors.count("\n") == (1 if told else 0) and errors.startswith(told)
    assert not toy.processes()


def wait_for(marks: list[Path], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not all(mark.exists() for mark in marks):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
