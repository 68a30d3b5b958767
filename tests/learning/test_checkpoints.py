"""Checkpoints: whole or not at all, verified, refused by name, and every random generator in them."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tasks.core.files import content_hash
from tasks.core.passing_faults import PassingFault
from tasks.learning.shared import checkpoints as checkpointing
from tasks.learning.shared.checkpoints import Checkpoints, random_state, restore_random_state
from tasks.learning.shared.tensor_files import HostCopies, Tensors, read_tensors, write_tensors


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, {"policy": {"w": torch.full((3,), float(step))}}, {"count": step})
    written(checkpoints)
    return checkpoints


def written(checkpoints: Checkpoints) -> None:
    """Once the write under way has ended."""
    checkpoints.current_snapshots()


def test_the_newest_checkpoint_is_loaded_as_it_was_written(tmp_path: Path) -> None:
    found, refused = saved(tmp_path, 5, 10).load()
    assert found is not None
    assert (found.step, found.state, refused) == (10, {"count": 10}, [])
    assert found.tensors["policy"]["w"].tolist() == [10.0, 10.0, 10.0]


def test_only_the_newest_two_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 15)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["iteration-000010", "iteration-000015"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["torn", "altered", "missing"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: str
) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    file = tmp_path / "iteration-000010" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-9] if damage == "torn" else content.replace(b"1", b"2", 1))
    found, refused = checkpoints.load()
    assert found is not None
    assert found.step == 5
    assert len(refused) == 1
    assert "iteration-000010" in refused[0]
    assert name in refused[0]


def test_a_damaged_snapshot_spoils_the_checkpoints_that_go_with_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    snapshot = checkpoints.snapshots / "iteration-0010"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    checkpoints.save(10, {}, {})
    written(checkpoints)
    (snapshot / "model.safetensors").write_bytes(b"weighty")
    found, refused = Checkpoints(tmp_path).load()
    assert found is not None
    assert found.step == 5
    assert "the snapshot iteration-0010" in refused[0]
    assert not snapshot.exists()  # it is from after the checkpoint in use, and will be written again


def test_where_nothing_is_whole_nothing_is_loaded_and_all_is_moved_aside(tmp_path: Path) -> None:
    """Also a second time; and no newer number of a refused one makes the next run's first checkpoint the oldest."""
    for times in (1, 2):
        checkpoints = saved(tmp_path, 5, 10, 15)
        for step in ("iteration-000010", "iteration-000015"):
            (tmp_path / step / "manifest.json").write_text("{")
        found, refused = checkpoints.load()
        assert found is None
        assert len(refused) == 2
        assert all(f"moved to {tmp_path / 'refused'}" in sentence for sentence in refused)
        assert len(list((tmp_path / "refused").iterdir())) == 2 * times
        assert [item.name for item in tmp_path.iterdir()] == ["refused"]
    found, refused = saved(tmp_path, 5).load()
    assert (found and found.step, refused) == (5, [])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("read", ["read_json", "content_hash", "numbered_folders", "read_tensors"])
def test_a_checkpoint_that_cannot_be_read_now_ends_the_run_and_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, read: str
) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    (checkpoints.snapshots / "iteration-0010").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))

    def fail(place: Path, *_: object) -> None:
        raise OSError(number, os.strerror(number), str(place))

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, read, fail)
        with pytest.raises(PassingFault, match=rf"cannot be read now .*{os.strerror(number)}"):
            checkpoints.load()
    assert sorted(tmp_path.rglob("*")) == before
    found, refused = Checkpoints(tmp_path).load()
    assert (found and found.step, refused) == (10, [])


def test_a_snapshot_stays_while_a_checkpoint_that_may_need_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, 5)
    snapshot = checkpoints.snapshots / "iteration-0010"
    snapshot.mkdir(parents=True)
    checkpoints.save(10, {}, {})
    checkpoints.give_up_snapshot("iteration-0010")

    def fail(file: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "read_json", fail)
        checkpoints.save(12, {}, {})
        written(checkpoints)
    assert snapshot.exists()
    checkpoints.save(15, {}, {})
    checkpoints.close()
    assert not snapshot.exists()


def test_a_snapshot_given_up_is_kept_until_no_checkpoint_goes_with_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    snapshot = checkpoints.snapshots / "iteration-0010"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    checkpoints.save(10, {}, {})
    checkpoints.give_up_snapshot("iteration-0010")
    checkpoints.save(12, {}, {})
    written(checkpoints)
    assert checkpoints.current_snapshots() == []
    again = Checkpoints(tmp_path)
    assert again.load()[1] == []
    assert again.current_snapshots() == []
    assert snapshot.exists()  # what iteration-000010 would need, were iteration-000012 torn
    again.save(15, {}, {})
    written(again)
    assert not snapshot.exists()


def test_numbered_folders_sort_by_number(tmp_path: Path) -> None:
    """A millionth step comes after step 999,999, though not by name."""
    checkpoints = saved(tmp_path, 999_999, 1_000_000)
    found, _ = checkpoints.load()
    assert (found and found.step) == 1_000_000
    checkpoints.save(1_000_001, {}, {})
    written(checkpoints)
    assert {item.name for item in tmp_path.iterdir()} == {"iteration-1000000", "iteration-1000001"}


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    (tmp_path / ".iteration-000010.123.partial").mkdir()
    assert Checkpoints(tmp_path).load()[0] is not None
    assert [item.name for item in tmp_path.iterdir()] == ["iteration-000005"]


def test_every_random_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    expected = (random.random(), np.random.rand(), torch.rand(2).tolist())
    checkpoints.load()
    assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == expected


class SlowWriter:
    """Writes as the real one does, once it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.may_write, self.is_writing = threading.Event(), threading.Event()
        monkeypatch.setattr(checkpointing, "write_tensors", self)

    def __call__(self, folder: Path, tensors: Tensors) -> None:
        self.is_writing.set()
        assert self.may_write.wait(30)
        write_tensors(folder, tensors)


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save` returns before a byte is written; tensors, metrics and random numbers are those at the time of `save`."""
    writer, checkpoints = SlowWriter(monkeypatch), Checkpoints(tmp_path)
    weights, transposed, metrics = torch.ones(3), torch.arange(6.0).reshape(2, 3).t(), [1]
    checkpoints.save(5, {"policy": {"w": weights, "t": transposed}, "optimizer": {"step": weights[0]}}, {"m": metrics})
    assert writer.is_writing.wait(30)
    expected = torch.rand(2).tolist()
    weights.add_(1.0)
    metrics.append(2)
    assert [item.name for item in tmp_path.iterdir() if not item.name.startswith(".")] == []
    writer.may_write.set()
    found, _ = checkpoints.load()
    assert found is not None
    assert found.state == {"m": [1]}
    assert found.tensors["policy"]["w"].tolist() == [1.0] * 3
    assert found.tensors["policy"]["t"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found.tensors["optimizer"]["step"].item() == 1.0
    assert torch.rand(2).tolist() == expected


@pytest.mark.slow
def test_the_next_checkpoint_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, checkpoints = SlowWriter(monkeypatch), Checkpoints(tmp_path)
    checkpoints.save(5, {}, {})
    threading.Timer(0.3, writer.may_write.set).start()
    checkpoints.save(10, {}, {})
    assert (tmp_path / "iteration-000005" / "manifest.json").exists()
    checkpoints.close()
    assert (tmp_path / "iteration-000010" / "manifest.json").exists()


@pytest.mark.parametrize("then", ["save", "close"])
def test_a_write_that_failed_is_told_by_the_next_save_or_by_close_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    checkpoints = saved(tmp_path, 5)

    def fail(folder: Path, tensors: Tensors) -> None:
        (folder / "half.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "write_tensors", fail)
        checkpoints.save(10, {}, {})
        with pytest.raises(
            ValueError, match=r"could not be written .*No space left.*run the same command again"
        ) as told:
            checkpoints.save(15, {}, {}) if then == "save" else checkpoints.close()
    assert "\n" not in str(told.value)
    assert isinstance(told.value.__cause__, OSError)  # from which the command line knows a full disk
    assert [item.name for item in tmp_path.iterdir()] == ["iteration-000005"]
    found, refused = Checkpoints(tmp_path).load()
    assert (found and found.step, refused) == (5, [])


def test_what_cannot_be_written_names_the_cause_and_not_the_library(tmp_path: Path) -> None:
    """What torch.distributed raises has many lines and is no Exception."""
    weights = torch.ones(2)
    with pytest.raises(RuntimeError, match="share memory"):
        write_tensors(tmp_path, {"policy": {"one": weights, "other": weights}})


def test_every_dtype_of_weights_and_optimizers_comes_back_bitwise_and_a_part_without_tensors_too(
    tmp_path: Path,
) -> None:
    bits = torch.arange(-8, 8)
    named = {str(dtype): bits.to(dtype) / 3 for dtype in (torch.float32, torch.bfloat16, torch.float64)}
    named |= {"whole": bits, "empty": torch.zeros(0, 3), "flag": bits > 0, "number": torch.tensor(7.0)}
    write_tensors(tmp_path, {"policy": named, "optimizer": {}})
    assert sorted(item.name for item in tmp_path.iterdir()) == ["optimizer.safetensors", "policy.safetensors"]
    read = read_tensors(tmp_path)
    assert read["optimizer"] == {}
    assert read["policy"].keys() == named.keys()
    assert all(read["policy"][name].dtype == tensor.dtype for name, tensor in named.items())
    assert all(torch.equal(read["policy"][name], tensor) for name, tensor in named.items())


def test_equal_states_are_equal_bytes_in_whatever_order_they_come(tmp_path: Path) -> None:
    one, other = torch.ones(3), torch.zeros(2)
    for place, named in (("a", {"one": one, "other": other}), ("b", {"other": other, "one": one})):
        (tmp_path / place).mkdir()
        write_tensors(tmp_path / place, {"policy": named})
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")


class OnCuda(torch.Tensor):
    is_cuda = True


def test_what_is_on_cuda_is_staged_into_memory_that_is_kept() -> None:
    """The stager is torch's own, here without pinning; it copies into the same memory each time."""
    copies = HostCopies()
    copies.stager = DefaultStager(StagingOptions(False, False, False, False))
    weights, step = torch.ones(4, dtype=torch.bfloat16).as_subclass(OnCuda), torch.tensor(1.0).as_subclass(OnCuda)
    state = {"policy": {"w": weights}, "optimizer": {"step": step}, "empty": {}}
    first = copies.of(state)
    weights.mul_(3)
    assert first["policy"]["w"].tolist() == [1.0] * 4
    second = copies.of(state)
    assert second["policy"]["w"].tolist() == [3.0] * 4
    assert (second["optimizer"]["step"].item(), second["empty"]) == (1.0, {})
    assert second["policy"]["w"].data_ptr() == first["policy"]["w"].data_ptr() != weights.data_ptr()


def test_a_run_of_two_gpus_goes_on_with_one_and_takes_the_first_ones_state(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {**random_state(), "cuda": ["0102", "0304"]}
    restored: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda found, device: restored.append((device, found.tolist())))
    restore_random_state(state)
    assert restored == [(0, [1, 2])]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    assert {item.suffix for item in (tmp_path / "iteration-000005").iterdir()} == {".json", ".safetensors"}
