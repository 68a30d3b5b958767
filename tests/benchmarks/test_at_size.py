"""The benchmark of a real size, on a model that takes a second: its phases, its plan, and what ends a process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tasks.planning import shapes
from tests.benchmarks.at_parent import run_below
from tests.benchmarks.at_size import Variant, build_folder, iterate, phase_table, planned, resume, shape_of

SMALL = Variant("small", "float32", has_lora=False, prompt=100)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.KNOWN, "small", ("qwen2", 2, 64, 128, 4, 2, 16, 5000, True))


@pytest.mark.slow
def test_every_phase_that_plan_knows_is_measured_and_the_run_resumes(tmp_path: Path) -> None:
    build_folder(tmp_path / "model", SMALL)
    done = iterate(tmp_path, SMALL)
    assert list(done["memory"]) == ["load", "rollout", "update", "save", "next rollout"]
    assert set(planned(SMALL)) == {*done["memory"], "peak"} - {"load"}
    again = resume(tmp_path, SMALL)
    assert (again["iteration"], again["sum"]) == (1, done["sum"])


def test_the_next_rollout_is_planned_with_the_checkpoint_that_the_first_one_has_not() -> None:
    """In full: weights, two averages and the reference, of 4 bytes per weight each."""
    told, count = planned(SMALL), shape_of(SMALL).num_parameters
    assert told["next rollout"] - told["rollout"] == 16 * count
    assert told["peak"] == max(told["update"], told["save"], told["next rollout"])


def test_fewer_layers_have_fewer_weights() -> None:
    """Two layers of the 24: 2 × (896 × (896 + 2 × 128 + 896) + 3 × 896 × 4864) in the matrices."""
    shape = shape_of(Variant("Qwen2.5-0.5B", "float32", has_lora=True, layers=2))
    assert shape.num_layers == 2
    assert shape.matrix_parameters == 2 * (896 * (896 + 2 * 128 + 896) + 3 * 896 * 4864)


def test_the_table_has_a_ratio_where_plan_knows_the_phase() -> None:
    load, rollout = phase_table({"load": 2e9, "rollout": 3e9}, {"rollout": 4e9}).splitlines()[1:]
    assert load.split() == ["load", "2.00", "GB"]
    assert rollout.split() == ["rollout", "3.00", "GB", "4.00", "GB", "0.75"]


@pytest.mark.slow
def test_a_process_is_ended_where_it_reaches_the_limit(tmp_path: Path) -> None:
    """300 MB that are written to, of which it may have 150."""
    hold = "import time; held = bytearray(b'x') * 300_000_000; time.sleep(60)"
    output, most, status = run_below([sys.executable, "-c", hold], tmp_path, 150e6)
    assert (output, status) == ("", -9) and most >= 150e6


def test_a_process_below_the_limit_says_what_it_has_to(tmp_path: Path) -> None:
    assert run_below([sys.executable, "-c", "print('done')"], tmp_path, 1e9)[::2] == ("done\n", 0)
