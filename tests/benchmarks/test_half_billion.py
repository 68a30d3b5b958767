"""Does `plan` say what a model of a real size takes? A random-weight Qwen2.5-0.5B goes through a whole iteration.

Prompts of 2,800 tokens, two groups of four, tool replies, packed update, checkpoint, snapshot, the episodes of the next
iteration while the checkpoint is written, and resume, each variant in processes of its own. An older commit goes
through the same, until it has taken what memory there is. Takes up to 20 GB and an hour on two cores: `make bench
ARGS='-k half_billion'` on a machine that does nothing else. Phases are printed as they end, a table per variant after
it; artifacts/bench/half_billion.json has all of it.

For a quick look that the benchmark itself runs: `TURNWISE_BENCH_PROMPT=100 TURNWISE_BENCH_LAYERS=2`; then no ratio is
held to anything, and the rows say so. `TURNWISE_BENCH_LIMIT_GB` bounds the older commit's process; without it, what is
free but 1 GB.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.core.files import read_json, write_json
from tests.benchmarks import at_parent
from tests.benchmarks.at_size import PROMPT, Variant, in_a_process, phase_table, planned
from tests.benchmarks.machine import cpu_model
from tests.conftest import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7200)]  # tens of minutes on a busy machine
FILE = ROOT / "artifacts" / "bench" / "half_billion.json"
WITHIN = 0.15
LAYERS = os.environ.get("TURNWISE_BENCH_LAYERS")
SHAPE = Variant(
    "Qwen2.5-0.5B",
    "float32",
    has_lora=True,
    prompt=int(os.environ.get("TURNWISE_BENCH_PROMPT", PROMPT)),
    layers=int(LAYERS) if LAYERS else None,
)
VARIANTS = [
    replace(SHAPE, dtype=dtype, has_lora=has_lora) for has_lora in (True, False) for dtype in ("float32", "bfloat16")
]
IN_FLOAT32 = [variant for variant in VARIANTS if variant.dtype == "float32"]  # the older commit has nothing else


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda item: item.name)
def test_an_iteration_takes_the_memory_that_plan_said(variant: Variant, tmp_path: Path) -> None:
    in_a_process("build", tmp_path, variant)
    done = in_a_process("iterate", tmp_path, variant)
    again = in_a_process("resume", tmp_path, variant)
    shutil.rmtree(tmp_path)
    told = planned(variant)
    row = {**size_of(variant), "planned": told, **done, "resumed": again, "ratio": done["peak"] / told["peak"]}
    print(f"\n{variant.name}\n{phase_table(done['memory'] | again['memory'] | {'peak': done['peak']}, told)}")
    keep(variant.name, row)
    assert (again["iteration"], again["sum"]) == (1, done["sum"])
    assert variant.layers is not None or abs(row["ratio"] - 1) <= WITHIN


@pytest.mark.parametrize("variant", IN_FLOAT32, ids=lambda item: item.name)
def test_the_older_commit_went_through_the_same(variant: Variant, tmp_path: Path) -> None:
    if not at_parent.is_here():
        pytest.skip(f"commit {at_parent.COMMIT[:7]} is not in this checkout")
    name, limit = f"{at_parent.COMMIT[:7]}: {variant.name}", memory_limit()
    in_a_process("build", tmp_path, variant)
    done = at_parent.measure(tmp_path, variant, limit=limit)
    shutil.rmtree(tmp_path)
    keep(name, {**size_of(variant), "limit": limit, **done})
    if "more_than" in done:
        print(f"\n{name}: more than {done['more_than'] / 1e9:.1f} GB")
        assert done["more_than"] > 0.5 * limit, "it was ended, and not for its memory"
    else:
        print(f"\n{name}\n{phase_table(done['memory'] | {'peak': done['peak']}, {})}")


def memory_limit() -> float:
    told = os.environ.get("TURNWISE_BENCH_LIMIT_GB")
    return 1e9 * float(told) if told else psutil.virtual_memory().available - 1e9


def size_of(variant: Variant) -> dict[str, Any]:
    return {"prompt": variant.prompt, "layers": variant.layers or "all"}


def keep(name: str, row: dict[str, Any]) -> None:
    """Beside the rows of other variants."""
    rows = read_json(FILE) if FILE.exists() else {}
    write_json(FILE, {**rows, "machine": cpu_model(), name: row})
