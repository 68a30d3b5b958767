"""What a flow loads ahead can be forked: no library starts a thread when it is imported, and each command is suited."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.profiles import profile_text

pytestmark = pytest.mark.slow
PROGRAM = """
import json, sys
from flows.loaded_early import NEEDED, load
from tasks.core.forks import has_other_threads
def suits(*command):
    steps = load(command)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
suited = {name: suits("tasks", name) for name in NEEDED}
suited["dvc"] = suits("dvc", "repro")
told = {"suited": suited, "lineage": suits("tasks", "lineage"), "threads": has_other_threads()}
told["missing"] = [name for name in ("torch", "mlflow", "great_expectations", "dvc") if name not in sys.modules]
told["family"] = "transformers.models.qwen3.modeling_qwen3" in sys.modules
text = open("params.yaml").read().replace("num_threads: 1", "num_threads: 7")
open("params.yaml", "w").write(text)
told["other threads"] = suits("tasks", "train")
print(json.dumps(told))
"""


def test_each_command_is_suited_and_no_thread_is_in_the_way_of_a_fork(tmp_path: Path):
    params = yaml.safe_load(profile_text("test"))
    params["compute"]["num_threads"] = 1
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert all(told.pop("suited").values()) and not told.pop("lineage")
    assert told == {"threads": False, "missing": [], "family": True, "other threads": False}
