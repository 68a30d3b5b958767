"""Every rate that promotion states, on all its trials; writes artifacts/bench/rates.json and the table of
infra/benchmarks.md, which `python -m tests.benchmarks.test_rates` prints from that file.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from rich.console import Console

from tasks.storage import read_json, write_json
from tests.benchmarks.machine import cpu_model
from tests.benchmarks.trainer_table import new_table
from tests.conftest import ROOT
from tests.simulations.rates import all_rates, measure

FILE = ROOT / "artifacts" / "bench" / "rates.json"


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_every_rate_is_as_stated() -> None:
    rows: list[dict[str, Any]] = []
    for rate in all_rates():
        started = time.perf_counter()
        measured = measure(rate)
        rows.append({**measured.to_row(), "seconds": round(time.perf_counter() - started, 1)})
    write_json(FILE, {"rows": rows, "machine": cpu_model()})
    table = new_table("Rates", "stated", "before", "now", "trials", "")
    for row in rows:
        told = "[green]holds[/]" if row["holds"] else "[bold red]does not hold[/]"
        verdict = told if row["stated"] else ""
        table.add_row(row["claim"], row["stated"], row["before"], row["now"], f"{row['num_trials']:,}", verdict)
    Console().print(table)
    assert not [row["claim"] for row in rows if not row["holds"]]


def markdown_table() -> str:
    """The rows of rates.json as infra/benchmarks.md has them."""
    lines = ["| claim | stated | before | now | trials |", "|---|---|---|---|---|"]
    for row in read_json(FILE)["rows"]:
        cells = (row["claim"], row["stated"], row["before"], row["now"], f"{row['num_trials']:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    Console().print(markdown_table(), soft_wrap=True, highlight=False, markup=False)
