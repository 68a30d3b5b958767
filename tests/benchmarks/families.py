"""The table of families in infra/benchmarks.md: `python -m tests.benchmarks.families` prints it."""

from __future__ import annotations

from tests.contracts.families import table

if __name__ == "__main__":
    print(table())
