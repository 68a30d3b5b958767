"""Every rate that promotion states, on all its trials; writes artifacts/bench/rates.json and the table of
infra/benchmarks.md, which `python -m tests.benchmarks.test_rates` prints from that file.
"""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from tasks.core.files import read_json, write_json
from tests.benchmarks.machine import cpu_model
from tests.benchmarks.trainer_table import new_table
from tests.conftest import ROOT
from tests.simulations.rates import all_rates, measure

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]
FILE = ROOT / "artifacts" / "bench" / "rates.json"


def test_every_rate_is_as_stated() -> None:
    rows: list[dict[str, Any]] = []
    for rate in all_rates():
        rows.append(measure(rate).to_row())
    write_json(FILE, {"rows": rows, "machine": cpu_model()})
    table = new_table("Rates", "stated", "before", "now", "accepted", "CPU s", "")
    for row in rows:
        verdict = "[green]holds[/]" if row["holds"] else "[bold red]does not hold[/]"
        cells = (row["claim"], row["stated"], row["before"], row["now"], row["limit"], f"{row['cpu_seconds']:.1f}")
        table.add_row(*cells, verdict)
    Console().print(table)
    seconds = sum(row["cpu_seconds"] for row in rows)
    Console().print(f"{seconds:.0f} s of CPU; a fifth of it, as make test runs, {seconds / 5:.0f} s")
    assert not [row["claim"] for row in rows if not row["holds"]]


def markdown_table() -> str:
    """The rows of rates.json as infra/benchmarks.md has them."""
    lines = ["| claim | stated | before | now | trials | accepted |", "|---|---|---|---|---|---|"]
    for row in read_json(FILE)["rows"]:
        cells = (row["claim"], row["stated"], row["before"], row["now"], f"{row['num_trials']:,}", row["limit"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    Console().print(markdown_table(), soft_wrap=True, highlight=False, markup=False)
