"""Seconds to build the trajectory browser from 1,000 and 10,000 trajectories. Writes artifacts/bench/report.json."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest

from tasks.measurement.report.browser import build_browser
from tasks.storage import write_json
from tests.benchmarks.demo import demo_params
from tests.benchmarks.machine import cpu_model
from tests.conftest import ROOT
from tests.measurement.small_world import many_policies

pytestmark = pytest.mark.bench
SIZES, ROUNDS = (1_000, 10_000), 3


def test_the_browser_of_ten_thousand_trajectories_is_built_in_seconds(tmp_path: Path) -> None:
    rows = []
    for size in SIZES:
        policies = many_policies(tmp_path / str(size), size)
        folder = tmp_path / f"report-{size}"
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            build_browser(folder, policies, title="made up")
            seconds.append(time.perf_counter() - start)
        tracemalloc.start()
        build_browser(folder, policies, title="made up")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append(
            {
                "trajectories": size,
                "seconds": round(min(seconds), 2),  # the machine is shared: what it can do, not what was left over
                "peak_mb": round(peak / 1e6),
                "read_mb": round(sum(policy.trajectories.stat().st_size for policy in policies) / 1e6),
                "written_mb": round(sum(file.stat().st_size for file in folder.rglob("*.js")) / 1e6),
            }
        )
        print("\n" + ", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    write_json(ROOT / demo_params()["paths"]["artifacts"] / "bench" / "report.json", {"cpu": cpu_model(), "rows": rows})
    assert rows[1]["seconds"] < 60
