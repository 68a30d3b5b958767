"""The records of what stages ran with, for projects in which no stage ran: as if all had, with params.yaml as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.core.files import write_json
from tasks.core.provenance import ABSENT, GRAPH, RECORDED, git_state, write_provenance
from tasks.core.settings import Paths
from tests.conftest import ROOT

READ = {  # the sections of params.yaml that stages read, for tests that edit some of them
    "curate": ("curate", "environment", "seed"),
    "assess": ("environment", "engine", "sampling", "seed"),
    "warm_start": ("compute", "engine", "environment", "sampling", "seed"),
    "train": ("compute", "engine", "environment", "reward", "sampling", "seed", "train"),
    "evaluate": ("compute", "engine", "environment", "evaluate", "sampling", "seed"),
}


def write_records(paths: Paths, params: Mapping[str, Any]) -> None:
    """A record of each stage, bound to the results that are in the folder now; a section that is not there is left
    out. Stages of a project without a dvc.yaml have no code.
    """
    if not GRAPH.exists():
        write_json(GRAPH, {"stages": {stage: {"deps": []} for stage in RECORDED}})
    commit, is_dirty = git_state(ROOT)
    for stage in RECORDED:
        paths.stage(stage).mkdir(parents=True, exist_ok=True)
        record = {
            "stage": stage,
            "settings": {name: params[name] for name in READ[stage] if name in params},
            "git_commit": commit,
            "git_dirty": is_dirty,
            "dvc_lock_hash": ABSENT,
            "code": {},
            "data": {},
            "packages": {"torch": "2.13.0"},
            "python": "3.11.9",
            "platform": "Linux x86_64",
            "cpu": "a processor",
            "num_threads": 2,
            "device": "cpu, x86_64",
        }
        write_provenance(record, paths)
