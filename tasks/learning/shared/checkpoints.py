"""Checkpoints for exact resume: written whole or not at all, hashed, and verified on load.

A checkpoint is a folder of safetensors files and a state.json; manifest.json contains the hash of each. A torn or
altered one is named and moved aside, and the one before it is used. Nothing is unpickled. The states of the random
number generators are saved too: a model's own code may draw from them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tasks.core.files import atomic_folder, content_hash, json_hash, numbered_folders, read_json, write_json, write_text
from tasks.core.resume import REFUSED

MANIFEST, STATE = "manifest.json", "state.json"
Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class Checkpoints:
    """The newest `keep` checkpoints of one run in `folder`, named by iteration or step, and its snapshots beside them.

    A snapshot stays on disk while any kept checkpoint lists it, even when the run has given it up: a kill between any
    two writes leaves a checkpoint with all of its snapshots. Refused checkpoints go to `refused/`; the snapshots follow
    where no checkpoint is left.
    """

    def __init__(self, folder: Path, *, unit: Literal["iteration", "step"] = "iteration", keep: int = 2):
        self.folder, self.unit, self.keep = folder, unit, keep
        self.snapshots, self.refused = folder / "snapshots", folder / REFUSED
        self.snapshot_hashes: dict[str, str] = {}
        self.given_up: set[str] = set()
        for leftover in (*folder.rglob(".*.partial"), *folder.rglob(".*.replaced")):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Write the checkpoint after `step` with the hashes of its snapshots, and delete the oldest."""
        from safetensors.torch import save_file

        with atomic_folder(self.folder / f"{self.unit}-{step:06d}") as temporary:
            for part, named in tensors.items():
                file = temporary / f"{part}.safetensors"
                save_file({name: tensor.contiguous() for name, tensor in named.items()}, file)
            # Not sorted: reading must give the same order.
            write_text(temporary / STATE, json.dumps({**state, "random": random_state()}, allow_nan=False))
            files = {item.name: content_hash(item) for item in sorted(temporary.iterdir())}
            for item in self.current_snapshots():
                if item.name not in self.snapshot_hashes:
                    self.snapshot_hashes[item.name] = content_hash(item)
            body = {"step": step, "files": files, "snapshots": self.snapshot_hashes}
            write_json(temporary / MANIFEST, {**body, "hash": json_hash(body)})
        for old in numbered_folders(self.folder)[: -self.keep]:
            shutil.rmtree(old)
        self._remove_unneeded_snapshots()

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, and one sentence per newer one that was refused.

        Where none is whole the run starts over, in a folder that contains only what was refused.
        """
        faults: dict[Path, str] = {}
        for folder in reversed(numbered_folders(self.folder)):
            fault = self._fault(folder)
            if fault is None:
                refused = self._refuse(faults, "going on from the checkpoint before it")
                return self._read(folder), refused
            faults[folder] = fault
        rest = "no checkpoint is left, so the run starts over"
        if faults and self.snapshots.exists():  # first: the checkpoints show these are no leftovers
            rest += f"; its snapshots were moved to {self._move_aside(self.snapshots)}"
        shutil.rmtree(self.snapshots, ignore_errors=True)  # of a run killed before its first checkpoint
        return None, self._refuse(faults, rest)

    def current_snapshots(self) -> list[Path]:
        return [item for item in numbered_folders(self.snapshots) if item.name not in self.given_up]

    def give_up_snapshot(self, name: str) -> None:
        self.given_up.add(name)
        self.snapshot_hashes.pop(name, None)

    def _refuse(self, faults: Mapping[Path, str], rest: str) -> list[str]:
        return [
            f"{folder}: {fault}, so it is not used and was moved to {self._move_aside(folder)}; {rest}."
            for folder, fault in faults.items()
        ]

    def _move_aside(self, folder: Path) -> Path:
        """Kept, since it may be the last copy of hours of work."""
        self.refused.mkdir(exist_ok=True)
        place, number = self.refused / folder.name, 1
        while place.exists():
            number += 1
            place = self.refused / f"{folder.name} ({number})"
        folder.rename(place)
        return place

    def _remove_unneeded_snapshots(self) -> None:
        needed: set[str] = set()
        for folder in numbered_folders(self.folder):
            with suppress(OSError, ValueError, KeyError, TypeError):  # a torn one lists nothing
                needed |= set(read_json(folder / MANIFEST)["snapshots"])
        for name in self.given_up - needed:
            shutil.rmtree(self.snapshots / name)
            self.given_up.remove(name)

    def _fault(self, folder: Path) -> str | None:
        try:
            manifest = dict(read_json(folder / MANIFEST))
            if manifest.pop("hash") != json_hash(manifest):
                return f"{MANIFEST} was altered"
            for name, expected in manifest["files"].items():
                if not (folder / name).is_file() or content_hash(folder / name) != expected:
                    return f"{name} is torn or was altered (its SHA-256 is not the one recorded)"
            for name, expected in manifest["snapshots"].items():
                if not (self.snapshots / name).is_dir() or content_hash(self.snapshots / name) != expected:
                    return f"the snapshot {name} it goes with is torn or was altered"
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"{MANIFEST} is missing or torn"
        return None

    def _read(self, folder: Path) -> Checkpoint:
        from safetensors.torch import load_file

        manifest, state = read_json(folder / MANIFEST), read_json(folder / STATE)
        restore_random_state(state.pop("random"))
        parts = {Path(name).stem: load_file(folder / name) for name in manifest["files"] if name != STATE}
        self.snapshot_hashes = dict(manifest["snapshots"])
        # Written after this checkpoint or given up before it: the run writes what it needs again.
        self.given_up = {item.name for item in numbered_folders(self.snapshots)} - self.snapshot_hashes.keys()
        self._remove_unneeded_snapshots()
        return Checkpoint(int(manifest["step"]), parts, state)


def seed_generators(seed: int) -> None:
    """Seed every generator of this process from the run's seed: new adapters draw from torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Every generator of this process as JSON: Python's, NumPy's, torch's on CPU and on each CUDA device."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.cpu().numpy().tobytes().hex() for state in torch.cuda.get_rng_state_all()],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    torch.cuda.set_rng_state_all([_bytes(text) for text in state["cuda"]])


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
