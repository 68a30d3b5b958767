"""The command `plan`: a model, a machine and settings in; memory, time, dollars and where it fits out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tasks.commands.plan.plan import as_json, make_plan, print_plan
from tasks.core.console import SafeConsole


def test_nothing_need_be_downloaded_to_know_where_seven_billion_with_lora_fit() -> None:
    plan = make_plan(model="Qwen2.5-7B", gpu="a100-80gb", profiles=["my_model"], dollars_per_hour=2.0)
    assert plan.fits_on["a100-80gb"] == "yes"
    assert plan.fits_on["4090-24gb"].startswith("with compute.frozen: bfloat16")
    row = json.loads(as_json(plan))
    assert row["fits"]
    assert row["memory"]["weights"]["update"] == 4 * 7_615_616_512
    assert row["dollars"] == pytest.approx(2.0 * row["seconds"]["total"] / 3600)


def test_what_does_not_fit_is_told_with_the_arithmetic_and_the_status_says_so() -> None:
    plan = make_plan(model="Qwen2.5-7B", gpu="4090-24gb", profiles=["my_model"], tokens=(2000, 300, 300))
    output = io.StringIO()
    assert not print_plan(plan, SafeConsole(file=output, width=120))
    told = output.getvalue()
    assert "does not fit: 30 GB weights" in told
    assert "prompt 2,000, sampled 300, replies 300" in told


def test_the_demo_is_planned_from_params_yaml_for_this_processor() -> None:
    plan = make_plan()
    assert plan.setup.machine.name == "cpu"
    assert 0 < plan.memory.peak < 2e9
    assert plan.seconds.num_iterations == 110


def test_what_is_not_known_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Qwen3-4B"):
        make_plan(model=str(tmp_path))
    with pytest.raises(ValueError, match="a100-40gb"):
        make_plan(gpu="a9000")
    with pytest.raises(ValueError, match="my_model"):
        make_plan(profiles=["nobody"])
