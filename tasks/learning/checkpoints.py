"""Checkpoints for exact resume: everything a trainer is, written whole or not at all, hashed, and verified on load.

A checkpoint is a folder of safetensors files and a state.json; its manifest.json names the hash of each. A torn or
altered one is refused by name and the one before it is used. Nothing is ever unpickled. What goes in is the trainer's
to say; this module also captures the random number generators that a model's own code may draw from.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.storage import atomic_folder, content_hash, json_hash, read_json, write_json, write_text

MANIFEST, STATE = "manifest.json", "state.json"
Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `load` found: the step it was written after, tensors by part and name, and the rest as JSON."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class Checkpoints:
    """The newest `keep` checkpoints of one run in `folder`; `snapshots/` beside them holds what the run hands on."""

    def __init__(self, folder: Path, *, keep: int = 2):
        self.folder, self.keep = folder, keep
        self.snapshots = folder / "snapshots"
        self.snapshot_hashes: dict[str, str] = {}
        for leftover in (*folder.rglob(".*.partial"), *folder.rglob(".*.replaced")):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, drop the oldest; snapshots are listed by hash, since resuming needs them."""
        from safetensors.torch import save_file

        with atomic_folder(self.folder / f"step-{step:06d}") as temporary:
            for part, named in tensors.items():
                save_file({name: tensor.contiguous() for name, tensor in named.items()}, temporary / _file(part))
            # Not sorted: what is read back must be written out in the same order.
            write_text(temporary / STATE, json.dumps({**state, "random": random_state()}, allow_nan=False))
            files = {item.name: content_hash(item) for item in sorted(temporary.iterdir())}
            for item in self._snapshot_folders():
                if item.name not in self.snapshot_hashes:
                    self.snapshot_hashes[item.name] = content_hash(item)
            body = {"step": step, "files": files, "snapshots": self.snapshot_hashes}
            write_json(temporary / MANIFEST, {**body, "hash": json_hash(body)})
        for old in self._checkpoint_folders()[: -self.keep]:
            shutil.rmtree(old)

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and one sentence for each newer one that was refused."""
        refused: list[str] = []
        for folder in reversed(self._checkpoint_folders()):
            fault = self._fault(folder)
            if fault is None:
                return self._read(folder), refused
            refused.append(f"{folder}: {fault}, so it is not used; going on from the checkpoint before it.")
        return None, refused

    def clear(self) -> None:
        """Start over: nothing of what is here can be gone on from."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _fault(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint, naming the file; None where it is whole."""
        try:
            manifest = dict(read_json(folder / MANIFEST))
            told = manifest.pop("hash")
            if told != json_hash(manifest):
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
        for snapshot in self._snapshot_folders():
            if snapshot.name not in manifest["snapshots"]:
                shutil.rmtree(snapshot)  # written after this checkpoint: it will be written again
        return Checkpoint(int(manifest["step"]), parts, state)

    def _checkpoint_folders(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def _snapshot_folders(self) -> list[Path]:
        return sorted(self.snapshots.glob("step-*"))


def seed_generators(seed: int) -> None:
    """Start every generator of this process from the run's seed: dropout and new adapters draw from torch's."""
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


def _file(part: str) -> str:
    return f"{part}.safetensors"
