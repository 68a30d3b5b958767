"""One rank of `tests/ranks.py`: it reads a call per line, and all ranks take the same calls, until there is none."""

from __future__ import annotations

import importlib
import json
import sys

import torch
import torch.distributed as dist

from tasks.learning.shared.ranks import Ranks
from tests.ranks import DONE


def main(step_seconds: float) -> None:
    ranks = Ranks.meet(torch.device("cpu"), meet_seconds=60, step_seconds=step_seconds)
    for line in sys.stdin:
        module, name, arguments = json.loads(line)
        getattr(importlib.import_module(module), name)(ranks, *arguments)
        print(DONE, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]))
