"""How `make test` shares its tests among workers (pytest-xdist): a file at a time, the longest first.

Files that wait for the same slow thing (an engine of vLLM, a whole flow, two ranks, the servers of tests/services, the
sources of the project parsed) go to one worker, which starts it once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = {
    "tests/contracts/test_imports.py": "sources",
    "tests/contracts/test_dvc_deps.py": "sources",
    "tests/contracts/test_loading.py": "sources",
    "tests/contracts/test_terminal.py": "sources",
    "tests/contracts/test_engines.py": "vllm",
    "tests/engines/vllm/test_vllm_engine.py": "vllm",
    "tests/engines/vllm/test_vllm_nccl.py": "vllm",
    "tests/learning/test_ranks.py": "ranks",
    "tests/stages/train/test_ranks_of_a_run.py": "ranks",
    "tests/pipeline/test_caching.py": "the finished flow",
    "tests/pipeline/test_drift_check.py": "the finished flow",
    "tests/pipeline/test_flow.py": "toy flows",
    "tests/pipeline/test_schedule.py": "toy flows",
    "tests/services/test_approval.py": "servers",
    "tests/services/test_second_machine.py": "servers",
    "tests/services/test_servers.py": "servers",
    "tests/services/test_story.py": "servers",
}
# The longest first, by seconds of a processor and of waiting: a long file that is begun last has one worker wait for
# the other. `make test ARGS=--durations=100` shows the seconds; the rest follows in the order of its names.
LONGEST = (
    "tests/pipeline/test_demo.py",
    "tests/services",
    "tests/examples/test_shop.py",
    "tests/pipeline/test_flow.py",
    "tests/contracts/test_engines.py",
    "tests/pipeline/test_own_model_and_data.py",
    "tests/stages/train/test_training.py",
    "tests/stages/promote/test_rates.py",
    "tests/pipeline/test_serve.py",
    "tests/pipeline/test_supervise.py",
    "tests/pipeline/test_workspaces.py",
    "tests/stages/promote/test_promote.py",
    "tests/infra/test_services_as_composed.py",
    "tests/tracking/test_clicks.py",
    "tests/learning/test_ranks.py",
    "tests/environments/test_bfcl_checker.py",
    "tests/stages/train/test_pipelined.py",
    "tests/tracking/test_aliases.py",
    "tests/tracking/test_registry_verbs.py",
    "tests/pipeline",
    "tests/stages/train",
    "tests/stages/promote/test_promote_budget.py",
    "tests/stages",
    "tests/learning",
    "tests/environments",
    "tests/tracking",
    "tests/browser",
    "tests/engines",
    "tests/commands",
    "tests/infra",
    "tests/contracts",
)


class FileScheduling(LoadScopeScheduling):
    """Tests of one group run one after another in one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(file := nodeid.split("::")[0], file)


def group_of(item: pytest.Item) -> str:
    """Its entry of TOGETHER, or its file."""
    return TOGETHER.get(file := _file_of(item), file)


def longest_first(item: pytest.Item) -> int:
    """What to sort the tests by: a group is where its first file is."""
    file, group = _file_of(item), group_of(item)
    first = next((name for name, of_group in TOGETHER.items() if of_group == group), file)
    return next((place for place, name in enumerate(LONGEST) if first.startswith(name)), len(LONGEST))


def _file_of(item: pytest.Item) -> str:
    return Path(item.path).relative_to(item.config.rootpath).as_posix()
