"""Uploads beside a training: a slow or refusing S3 never stops it, and an empty disk goes on with the same bits."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

from tasks.core.files import content_hash, link_or_copy, write_json
from tasks.core.urls import parse_url
from tasks.storage import mirror
from tasks.storage.client import connect
from tasks.storage.folders import MANIFEST, find_manifest, get_folder
from tasks.storage.mirror import RESULTS, fetch_resume, newest_step, resume_url
from tasks.storage.settings import StorageSections
from tasks.storage.uploader import Sync, Task, uploading
from tests import tiny
from tests.conftest import ROOT
from tests.pipeline.kill_points import result_hash, whole_run
from tests.services.servers import wait_until
from tests.storage.fault_proxy import FaultProxy, answering
from tests.storage.places import SETTINGS, Place, sections

pytestmark = pytest.mark.slow
BIG = 3_000_000


@pytest.fixture(autouse=True)
def finds_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uploader is another process, in the workspace."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def checkpoint(resume: Path, iteration: int, *, size: int = 1000) -> None:
    """As training leaves them: renamed when complete, the snapshot first, two checkpoints kept."""
    for place in (resume / "snapshots" / f"iteration-{iteration:04d}", resume / f"iteration-{iteration:06d}"):
        partial = place.with_name(f".{place.name}.partial")
        partial.mkdir(parents=True)
        (partial / "weights").write_bytes(os.urandom(size))
        partial.rename(place)
    for old in sorted(resume.glob("iteration-*"))[:-2]:
        shutil.rmtree(old)


def wait_for(step: int, own: StorageSections, resume: Path) -> None:
    store, url = connect(SETTINGS), resume_url(parse_url(str(own.paths.remote)), "train", resume)
    deadline = time.monotonic() + 30
    while (found := find_manifest(store, url)) is None or newest_step(found.manifest) < step:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_until_told(capfd: pytest.CaptureFixture[str], what: str) -> None:
    deadline = time.monotonic() + 30
    while what not in capfd.readouterr().err:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_checkpoints_come_while_it_trains_and_an_empty_disk_gets_the_newest(place: Place, tmp_path: Path):
    own, resume = sections(place.url("agent"), tmp_path / "artifacts"), tmp_path / "artifacts" / "resume" / "key"
    with suppress(InterruptedError), uploading(own, [], stage="train", resume=resume):
        for iteration in (5, 10):
            checkpoint(resume, iteration)
            wait_for(iteration, own, resume)
        checkpoint(resume, 15)
        raise InterruptedError  # the last checkpoint is sent by the end
    kept = content_hash(resume)
    shutil.rmtree(resume)
    write_json(resume.parent / ".key.31396.partial" / "weights", {})  # a call before this one was killed
    fetch_resume(own, "train", resume)
    assert [item.name for item in resume.parent.iterdir()] == ["key"]
    assert content_hash(resume) == kept
    assert sorted(item.name for item in resume.glob("iteration-*")) == ["iteration-000010", "iteration-000015"]


def test_the_end_sends_the_results_copies_known_snapshots_and_forgets_the_checkpoints(
    place: Place, faults: FaultProxy, tmp_path: Path
):
    artifacts = tmp_path / "artifacts"
    own, resume = sections(place.url("agent"), artifacts), artifacts / "resume" / "key"
    with uploading(own, ["train"], stage="train", resume=resume):
        checkpoint(resume, 5, size=BIG)
        wait_for(5, own, resume)
        sent = faults.bytes_up
        shutil.copytree(resume / "snapshots", artifacts / "train" / "snapshots")
        write_json(artifacts / "train" / "learnt.json", {})
    assert faults.bytes_up - sent < BIG / 10
    get_folder(connect(SETTINGS), parse_url(place.url("agent")) / RESULTS / "train", tmp_path / "read")
    assert content_hash(tmp_path / "read") == content_hash(artifacts / "train")
    assert place.names("agent/resume") == []


def test_an_upload_that_is_killed_at_its_end_leaves_nothing_here(place: Place, faults: FaultProxy, tmp_path: Path):
    artifacts = tmp_path / "artifacts"
    own = sections(place.url("agent"), artifacts)
    own = own.model_copy(update={"storage": SETTINGS.model_copy(update={"finish_seconds": 0.0})})
    faults.delay_seconds = 1.0
    checkpoint(artifacts / ".resume" / "key", 5, size=BIG)
    with uploading(own, [], stage="train", resume=artifacts / ".resume" / "key"):
        wait_until(lambda: any((artifacts / ".mirror").rglob("weights")), "links to the checkpoint")
        shutil.rmtree(artifacts / ".resume")  # as a stage does that succeeded
    assert [item for item in artifacts.rglob("*") if item.is_file()] == []


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_checkpoint_that_training_deletes_while_it_is_linked_is_no_failure_and_any_other_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_deleted: bool
):
    folder, artifacts = tmp_path / "key", tmp_path / "artifacts"
    checkpoint(folder, 5)

    def fail(source: str, target: str) -> None:
        if is_deleted:
            shutil.rmtree(folder)
            link_or_copy(source, target)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)

    monkeypatch.setattr(mirror, "link_or_copy", fail)
    task = Task(
        remote="s3://bucket/agent",
        storage=SETTINGS,
        artifacts=str(artifacts),
        names=[],
        frozen=None,
        stage="train",
        resume=str(folder),
    )
    sync = Sync(task)
    assert not sync.upload_checkpoints()
    said = capfd.readouterr().err
    assert (sync.is_passing, "No space left" in said, said.count("\n")) == (True, not is_deleted, int(not is_deleted))
    assert "[(" not in said
    assert sync.upload_checkpoints() == is_deleted  # nothing is left to send


@pytest.mark.parametrize("fault", ["refuses", "slow", "cuts"])
def test_whatever_s3_does_the_stage_ends_in_time_and_says_it_once(
    place: Place, faults: FaultProxy, tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str
):
    artifacts = tmp_path / "artifacts"
    own = sections(place.url("agent"), artifacts)
    own = own.model_copy(update={"storage": SETTINGS.model_copy(update={"finish_seconds": 3.0})})
    faults.refuses = fault == "refuses"
    faults.delay_seconds = 2.0 if fault == "slow" else 0.0
    faults.cut_up_at = 200_000 if fault == "cuts" else None
    began = time.monotonic()
    with uploading(own, ["train"], stage="train", resume=artifacts / "resume" / "key"):
        checkpoint(artifacts / "resume" / "key", 5, size=BIG)
        (artifacts / "train").mkdir()
        (artifacts / "train" / "weights").write_bytes(os.urandom(BIG))
        assert time.monotonic() - began < 1.0
        time.sleep(2.0)
    assert time.monotonic() - began < 10.0
    said = capfd.readouterr().err
    assert said.count("it is tried again") == (fault != "slow")
    assert said.count("python -m tasks report") == 1
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in said

    faults.heal()  # and later it is sent after all
    with uploading(sections(place.url("agent"), artifacts), ["train"], stage="report"):
        pass
    assert f"agent/results/train/{MANIFEST}" in place.names()


EXPIRED = answering("400 Bad Request", "ExpiredToken")


def test_what_stays_wrong_is_told_at_the_end_also_after_a_fault_that_passed(
    place: Place, faults: FaultProxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    artifacts = tmp_path / "artifacts"
    own, resume = sections(place.url("agent"), artifacts), artifacts / "resume" / "key"
    faults.refuses = True
    with uploading(own, ["train"], stage="train", resume=resume):
        checkpoint(resume, 5)
        wait_until_told(capfd, "it is tried again")
        faults.heal()
        wait_for(5, own, resume)
        time.sleep(2.0)  # the upload itself ends
        faults.answer = EXPIRED
        faults.drop()
        write_json(artifacts / "train" / "learnt.json", {})
    said = capfd.readouterr().err
    assert "token has expired" in said
    assert "tried again" not in said
    assert said.count("python -m tasks report") == 1


def test_a_failed_stage_says_that_its_last_checkpoint_is_here_alone(
    place: Place, faults: FaultProxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    resume = tmp_path / "artifacts" / "resume" / "key"
    with (
        suppress(InterruptedError),
        uploading(sections(place.url("agent"), tmp_path / "artifacts"), [], stage="train", resume=resume),
    ):
        faults.answer = EXPIRED
        checkpoint(resume, 5)
        raise InterruptedError
    *_, why, what = capfd.readouterr().err.splitlines()
    assert "token has expired" in why
    assert "tried again" not in why
    assert "the next run sends it" in what


def test_a_profile_that_is_not_there_is_one_line(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with uploading(sections(place.url("agent"), tmp_path / "artifacts"), ["train"], stage="train"):
        write_json(tmp_path / "artifacts" / "train" / "learnt.json", {})
    why, what = capfd.readouterr().err.splitlines()
    assert "nowhere" in why
    assert "python -m tasks report" in what


def test_an_upload_that_was_killed_is_told(place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with uploading(sections(place.url("agent"), tmp_path / "artifacts"), ["train"], stage="train"):
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # of another test, and about to end
                if "tasks.storage.uploader" in child.cmdline():
                    child.kill()
    said = capfd.readouterr().err
    assert "status -9" in said
    assert "python -m tasks report" in said


def test_a_server_that_recovers_gets_what_it_lacked_while_the_stage_still_works(
    place: Place, faults: FaultProxy, tmp_path: Path
):
    own, resume = sections(place.url("agent"), tmp_path / "artifacts"), tmp_path / "artifacts" / "resume" / "key"
    faults.refuses = True
    with uploading(own, [], stage="train", resume=resume):
        checkpoint(resume, 5)
        time.sleep(2.0)
        faults.heal()
        wait_for(5, own, resume)


def test_where_the_server_cannot_be_asked_a_training_without_checkpoints_does_not_start_over(
    place: Place, faults: FaultProxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    own, resume = sections(place.url("agent"), tmp_path / "artifacts"), tmp_path / "artifacts" / "resume" / "key"
    faults.refuses = True
    with pytest.raises(ValueError, match=r"paths\.remote"):
        fetch_resume(own, "train", resume)
    checkpoint(resume, 5)
    fetch_resume(own, "train", resume)
    assert "goes on from the checkpoint here" in capfd.readouterr().err


def test_a_training_killed_on_one_machine_ends_bitwise_the_same_on_another_with_an_empty_disk(
    place: Place, tmp_path: Path
):
    start = tiny.model_folder(tmp_path / "start")
    whole = whole_run(start, tmp_path / "whole")
    killed, remote = tmp_path / "killed", place.url("agent")
    worker, _ = start_mirrored(start, killed, remote)
    wait_for(2, sections(remote, killed), killed / "resume")
    uploaders = psutil.Process(worker.pid).children(recursive=True)
    worker.kill()
    worker.wait()
    psutil.wait_procs(uploaders, timeout=60)  # it sends the last checkpoint, and writes in the folder meanwhile
    shutil.rmtree(killed)

    again = tmp_path / "again"
    worker, fetched = start_mirrored(start, again, remote)
    assert max(fetched) >= "iteration-000002"
    assert worker.wait(timeout=300) == 0
    assert result_hash(again) == whole.hash


def start_mirrored(start: Path, machine: Path, remote: str) -> tuple[subprocess.Popen[str], list[str]]:
    """The training, once it is ready, and the checkpoints that it began with."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.storage.mirrored_worker", str(start), str(machine), remote]
    worker = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    return worker, list(takewhile(lambda line: line != "ready", map(str.strip, worker.stdout)))
