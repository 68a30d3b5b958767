"""A flow's `dvc repro`: dvc.lock gets the params and hashes that a stage began with.

    python -m tasks.pipeline.dvc_repro --single-item train

DVC reads them again when the stage has ended (github.com/treeverse/dvc/issues/11058), so it takes an edit meanwhile for
what the stage ran with: the edit is never run, and undoing it runs everything again. This does what the open pull
request 11062 does, and goes when DVC does it. A plain `dvc repro` has DVC's ways; promotion then refuses its results.
"""

from __future__ import annotations

import sys
from typing import Any

import dvc.stage
from dvc.cli import main

run_stage = dvc.stage.run_stage


def run_as_begun(stage: Any, dry: bool = False, force: bool = False, **options: Any) -> None:
    """In place of DVC's `run_stage`."""
    if force:
        stage.save_deps()  # without --force DVC does so itself, to look into its run cache
    run_stage(stage, dry, force, **options)
    stage.save_deps = lambda **_: None


if __name__ == "__main__":
    dvc.stage.run_stage = run_as_begun
    sys.exit(main(["repro", *sys.argv[1:]]))
