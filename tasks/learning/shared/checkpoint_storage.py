"""Where torch.distributed.checkpoint writes: one safetensors file per part of the state. Importing it takes a second.

Its own storage is pickled, or safetensors whose headers differ between equal states (infra/decisions/0037).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future


class SafetensorsWriter(StorageWriter):
    """Writes the tensor `part/name` as `name` in `part.safetensors`, from where it is: no second copy in memory."""

    def __init__(self, folder: Path, parts: Sequence[str]):
        self.folder, self.parts = folder, parts

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: dict[str, dict[str, Tensor]] = {part: {} for part in self.parts}
        for item in plan.items:
            part, name = item.index.fqn.split("/", 1)
            files[part][name] = planner.resolve_data(item)
        for part, named in files.items():
            save_file(named, self.folder / f"{part}.safetensors")
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
