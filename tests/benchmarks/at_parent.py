"""The iteration of `at_size.py` on a commit from before memory was counted, beside which its figures are shown.

`measure` writes that commit's files into a folder, puts the two modules of the benchmark beside them, and runs it there
in a process that is ended when it has more memory than it may: then all that is known is "more than that". What differs
in the older code is bridged here: it has float32 on a CPU and nothing else, `num_threads` beside the sections, and its
engine has a merged copy of an adapted model.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks import at_size
from tests.benchmarks.at_size import Variant
from tests.conftest import ROOT
from tests.profiles import profile_params

COMMIT = "8e5c6d1a7c0e3e57088d1fd72e20b184267c099f"
CARRIED = ("tests/benchmarks/at_size.py", "tests/benchmarks/at_parent.py")
LOOK_SECONDS = 0.1
params_of_now = at_size.variant_params


def is_here() -> bool:
    """Whether this checkout has the commit; a shallow clone or an archive does not."""
    done = subprocess.run(["git", "cat-file", "-e", COMMIT], cwd=ROOT, capture_output=True, check=False)
    return done.returncode == 0


def measure(folder: Path, variant: Variant, *, limit: float) -> dict[str, Any]:
    """What `at_size.iterate` gives, or {"more_than": bytes} where the process had `limit` bytes or the system ended it
    for its memory. `folder` contains the model of `variant`.
    """
    tree = folder / "tree"
    write_tree(tree)
    command = [sys.executable, "-m", "tests.benchmarks.at_parent", str(folder), json.dumps(asdict(variant))]
    output, most, status = run_below(command, tree, limit)
    if status == -9:
        return {"more_than": min(most, limit)}
    assert status == 0, f"the older commit's run ended with {status}"
    return dict(json.loads(output.splitlines()[-1]))


def write_tree(folder: Path, *, commit: str = COMMIT, carried: Sequence[str] = CARRIED) -> None:
    done = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    for name in carried:
        shutil.copyfile(ROOT / name, folder / name)


def run_below(command: Sequence[str], folder: Path, limit: float) -> tuple[str, float, int]:
    """What it printed, the most resident bytes that were seen, and its status: -9 where it reached `limit`."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    most = 0.0
    try:
        while process.poll() is None:
            try:
                most = max(most, float(psutil.Process(process.pid).memory_info().rss))
            except psutil.NoSuchProcess:
                break
            if most >= limit:
                process.kill()
            time.sleep(LOOK_SECONDS)
        output, _ = process.communicate()
    finally:
        process.kill()
    return output, most, process.returncode


def params_of_then(variant: Variant) -> dict[str, Any]:
    params = params_of_now(variant)
    params["num_threads"] = params.pop("compute")["num_threads"]
    return params


def profile_of_then(*names: str) -> dict[str, Any]:
    return profile_params(*names) | {"compute": {}}


def take_empty_step(run: Any) -> None:
    import torch

    optimizer = run.trainer.optimizer
    for parameter in optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(position=0)


def serve(run: Any) -> None:
    if run.adapter is not None:
        run.adapter.merge_into(run.served)
    run._refresh(run.iteration)


def main(arguments: Sequence[str]) -> None:
    """In the older tree: `at_size` with what differs there."""
    folder, told = arguments
    at_size.profile_params, at_size.variant_params = profile_of_then, params_of_then
    at_size.take_empty_step, at_size.serve = take_empty_step, serve
    print(json.dumps(at_size.iterate(Path(folder), Variant(**json.loads(told)))))


if __name__ == "__main__":
    main(sys.argv[1:])
