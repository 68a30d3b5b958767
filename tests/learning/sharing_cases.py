"""How much memory a rank takes for tensors that rank 0 sends: 16 of 16 MB, of which each of two ranks keeps half."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from tasks.core.files import write_json
from tasks.learning.shared.ranks import Ranks
from tasks.learning.shared.sharding import part_of, shapes_of, shared
from tasks.models.torch_setup import resident_bytes

NUM_TENSORS, LENGTH = 16, 1 << 22


def take_parts(ranks: Ranks, place: str) -> None:
    assert ranks.mesh is not None
    one = torch.ones(LENGTH)
    like = distribute_tensor(torch.zeros(LENGTH), ranks.mesh, [Shard(0)])
    tensors = {"policy": dict.fromkeys(map(str, range(NUM_TENSORS)), one)}
    sent = shared(shapes_of(tensors), tensors if ranks.leads else None, ranks)["policy"]
    before, most = resident_bytes(), 0
    kept = []
    for name in sent:
        kept.append(part_of(sent[name], like))
        most = max(most, resident_bytes() - before)
    total = sum(float(part.to_local().sum()) for part in kept)
    write_json(Path(place) / f"{ranks.number}.json", {"bytes": most, "total": total})
