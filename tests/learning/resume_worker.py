"""A trainer that goes on from its checkpoint: `python -m tests.learning.resume_worker FOLDER NAME:FROM:TO …`.

Each NAME:FROM:TO names a folder of checkpoints, its iteration, or 0 for a fresh start, and the one to go on to. Rank 0
writes the hash of the state and the norms of the weights then to FOLDER/NAME-TO.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from tasks.core.files import write_json
from tasks.learning.shared.checkpoints import Checkpoints
from tasks.learning.shared.ranks import ALONE, END, Ranks
from tests.learning.rank_worker import a_trainer, groups_of


def go_on(folder: Path, ranks: Ranks, name: str, first: int, last: int) -> None:
    trainer = a_trainer(folder / "model", ranks, schedule="cosine", warmup_steps=4)
    if not ranks.leads:
        trainer.follow()
        return
    checkpoints = Checkpoints(folder / name)
    found, refused = checkpoints.load()
    assert (found.step if found else 0, refused) == (first, [])
    if found is not None:
        trainer.load(found.tensors, found.state)
    for _ in range(last - first):
        trainer.iterate(lambda number, *_: groups_of("packed trees", number))
    tensors = trainer.tensors()
    checkpoints.save(last, tensors, trainer.state())
    checkpoints.close()
    state = hashlib.sha256(json.dumps(trainer.state()).encode())
    for part, named in tensors.items():
        for key, tensor in sorted(named.items()):
            state.update(f"{part}/{key}".encode() + tensor.detach().numpy().tobytes())
    norms = {key: float(tensor.double().norm()) for key, tensor in tensors["policy"].items()}
    write_json(folder / f"{name}-{last}.json", {"state": state.hexdigest(), "norms": norms})
    ranks.announce(END)


def main(folder: Path, *parts: str) -> None:
    is_alone = os.environ["WORLD_SIZE"] == "1"
    ranks = ALONE if is_alone else Ranks.meet(torch.device("cpu"), timeout_seconds=60)
    for part in parts:
        name, first, last = part.split(":")
        go_on(folder, ranks, name, int(first), int(last))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
