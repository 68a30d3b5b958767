"""Checkpoints: whole or not at all, verified, refused by name, and every random generator in them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.learning.shared.checkpoints import Checkpoints


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, {"policy": {"w": torch.full((3,), float(step))}}, {"count": step})
    return checkpoints


def test_the_newest_checkpoint_is_loaded_as_it_was_written(tmp_path: Path) -> None:
    found, refused = saved(tmp_path, 5, 10).load()
    assert found is not None
    assert (found.step, found.state, refused) == (10, {"count": 10}, [])
    assert found.tensors["policy"]["w"].tolist() == [10.0, 10.0, 10.0]


def test_only_the_newest_two_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 15)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["iteration-000010", "iteration-000015"]


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


def test_a_snapshot_given_up_is_kept_until_no_checkpoint_goes_with_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    snapshot = checkpoints.snapshots / "iteration-0010"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    checkpoints.save(10, {}, {})
    checkpoints.give_up_snapshot("iteration-0010")
    checkpoints.save(12, {}, {})
    assert checkpoints.current_snapshots() == []
    again = Checkpoints(tmp_path)
    assert again.load()[1] == []
    assert again.current_snapshots() == []
    assert snapshot.exists()  # what iteration-000010 would need, were iteration-000012 torn
    again.save(15, {}, {})
    assert not snapshot.exists()


def test_numbered_folders_sort_by_number(tmp_path: Path) -> None:
    """A millionth step comes after step 999,999, though not by name."""
    checkpoints = saved(tmp_path, 999_999, 1_000_000)
    found, _ = checkpoints.load()
    assert (found and found.step) == 1_000_000
    checkpoints.save(1_000_001, {}, {})
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


def test_nothing_is_pickled(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    assert {item.suffix for item in (tmp_path / "iteration-000005").iterdir()} == {".json", ".safetensors"}
