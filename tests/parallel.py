"""How `make test` shares its tests among workers (pytest-xdist): a file at a time, the longest first.

Files that wait for the same slow thing (an engine of vLLM, a finished flow) go to one worker, which starts it once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = {
    "tests/contracts/test_engines.py": "vllm",
    "tests/engines/vllm/test_vllm_engine.py": "vllm",
    "tests/engines/vllm/test_vllm_nccl.py": "vllm",
    "tests/pipeline/test_caching.py": "finished flow",
    "tests/pipeline/test_kills.py": "finished flow",
}
# Whole flows, the demo before all others: what takes minutes and is begun last has one worker wait for the other.
LONGEST = (
    "tests/pipeline/test_demo.py",
    "tests/pipeline",
    "tests/contracts/test_engines.py",
    "tests/rollouts/test_vllm",
)


class FileScheduling(LoadScopeScheduling):
    """Tests of one file, or of one entry of TOGETHER, run one after another in one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return TOGETHER.get(file, file)


def longest_first(item: pytest.Item) -> int:
    """What to sort the tests by."""
    file = Path(item.path).relative_to(item.config.rootpath).as_posix()
    return next((place for place, name in enumerate(LONGEST) if file.startswith(name)), len(LONGEST))
