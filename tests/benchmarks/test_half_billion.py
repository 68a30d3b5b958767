"""Does `plan` say what a model of a real size takes? A random-weight Qwen2.5-0.5B goes through a whole iteration.

Prompts of 2,800 tokens, two groups of four, tool replies, packed update, checkpoint, snapshot and resume, each variant
in processes of its own. Takes up to 20 GB and tens of minutes on two cores. Writes artifacts/bench/half_billion.json.
`TURNWISE_BENCH_PROMPT=300` takes shorter prompts where time is short; the shape stays, and the file says so.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.core.files import read_json, write_json
from tests.benchmarks.at_size import PROMPT, Variant, in_a_process, planned
from tests.benchmarks.machine import cpu_model
from tests.conftest import ROOT

pytestmark = pytest.mark.bench
FILE = ROOT / "artifacts" / "bench" / "half_billion.json"
WITHIN = 0.15
VARIANTS = [
    Variant("Qwen2.5-0.5B", dtype, has_lora, prompt=int(os.environ.get("TURNWISE_BENCH_PROMPT", PROMPT)))
    for has_lora in (True, False)
    for dtype in ("float32", "bfloat16")
]


@pytest.mark.timeout(7200)  # tens of minutes on a busy machine
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda item: item.name)
def test_an_iteration_takes_the_memory_that_plan_said(variant: Variant, tmp_path: Path) -> None:
    in_a_process("build", tmp_path, variant)
    done = in_a_process("iterate", tmp_path, variant)
    again = in_a_process("resume", tmp_path, variant)
    shutil.rmtree(tmp_path)
    told = planned(variant)
    row = {"prompt": variant.prompt, "planned": told, **done, "resumed": again, "ratio": done["peak"] / told["peak"]}
    print(variant.name, row)
    keep(variant.name, row)
    assert (again["iteration"], again["sum"]) == (1, done["sum"])
    assert abs(row["ratio"] - 1) <= WITHIN


def keep(name: str, row: dict[str, Any]) -> None:
    """Beside the rows of other variants."""
    rows = read_json(FILE) if FILE.exists() else {}
    write_json(FILE, {**rows, "machine": cpu_model(), name: row})
