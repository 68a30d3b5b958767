"""The demo's results as benchmarks read them: made by the flow in this folder, where they are not there yet."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tasks.core.settings import Paths, load_paths, read_params
from tests.conftest import ROOT


def demo_params() -> dict[str, Any]:
    return read_params(ROOT / "params.yaml")


def demo_artifacts() -> Paths:
    """Paths of a finished demo; runs the flow first (minutes) where there is none."""
    paths = Paths(ROOT / load_paths(demo_params()).artifacts)
    if not (paths.stage("evaluate") / "evaluation.json").exists():
        subprocess.run([sys.executable, "-m", "flows", "run"], cwd=ROOT, check=True)
    return paths
