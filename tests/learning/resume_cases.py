"""A trainer that goes on from its checkpoint, on the ranks that are there."""

from __future__ import annotations

import hashlib
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tasks.core.files import write_json
from tasks.learning.shared.checkpoints import Checkpoints
from tasks.learning.shared.ranks import END, Ranks
from tests.learning.rank_cases import BFLOAT16, a_trainer, groups_of


def load_one_by_one(ranks: Ranks, place: str) -> None:
    """A rank has a few whole tensors at most while it loads the checkpoint PLACE/whole."""
    trainer = a_trainer(Path(place) / "model", ranks)
    alive, most, share = [0], [0], ranks.share

    def leave() -> None:
        alive[0] -= 1

    def counted(*arguments: Any) -> Tensor:
        sent = share(*arguments)
        if sent.ndim:  # the optimizer keeps its step counts whole
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            weakref.finalize(sent, leave)
        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "share", counted)
        if ranks.leads:
            found, _ = Checkpoints(Path(place) / "whole").load()
            assert found is not None
            trainer.load(found.tensors, found.state)
            ranks.announce(END)
        else:
            trainer.follow()
            assert most[0] <= 3 and alive == [0], (most, alive)  # of dozens; the last has its name as the next arrives


def go_on(ranks: Ranks, place: str, name: str, first: int, last: int, weights: str = "float32") -> None:
    """From iteration `first` of the checkpoints PLACE/NAME, or a fresh start at 0, to `last`. Rank 0 writes the hash of
    the state and the norms of the weights then to PLACE/NAME-LAST.json.
    """
    folder = Path(place)
    compute = BFLOAT16 if weights == "bfloat16" else None
    trainer = a_trainer(folder / "model", ranks, compute=compute, schedule="cosine", warmup_steps=4)
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
            state.update(f"{part}/{key}".encode() + tensor.detach().float().numpy().tobytes())
    norms = {key: float(tensor.double().norm()) for key, tensor in tensors["policy"].items()}
    write_json(folder / f"{name}-{last}.json", {"state": state.hexdigest(), "norms": norms})
    ranks.announce(END)
