"""Checkpoints for exact resume: written whole or not at all, hashed, and verified on load.

A checkpoint is a folder of safetensors files and a state.json; manifest.json contains the hash of each. It is copied
when it is saved, and a thread writes and hashes it while training goes on. A torn or altered one is named and moved
aside, and the one before it is used; one that the system cannot read now ends the run. Nothing is unpickled. The states
of the random number generators are saved too: a model's own code may draw from them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tasks.core.files import atomic_folder, content_hash, json_hash, numbered_folders, read_json, write_json, write_text
from tasks.core.passing_faults import NOT_THERE, reading
from tasks.core.resume import REFUSED
from tasks.core.text import one_line
from tasks.learning.shared.tensor_files import HostCopies, Tensors, read_tensors, write_tensors

MANIFEST, STATE = "manifest.json", "state.json"
KEPT = 2  # checkpoints of a run


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class Checkpoints:
    """The newest KEPT checkpoints of one run in `folder`, named by iteration or step, and its snapshots beside them.

    A snapshot stays on disk while any kept checkpoint lists it, even when the run has given it up: a kill between any
    two writes leaves a checkpoint with all of its snapshots. Refused checkpoints go to `refused/`; the snapshots follow
    where no checkpoint is left.

    One write is under way at most. What went wrong in it is raised by the next `save`, or by `close`; the checkpoint
    before it stays.
    """

    def __init__(self, folder: Path, *, unit: Literal["iteration", "step"] = "iteration"):
        self.folder, self.unit = folder, unit
        self.snapshots, self.refused = folder / "snapshots", folder / REFUSED
        self.snapshot_hashes: dict[str, str] = {}
        self.given_up: set[str] = set()
        self.copies = HostCopies()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None
        for leftover in (*folder.rglob(".*.partial"), *folder.rglob(".*.replaced")):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Copy the state after `step`, and let the thread write it with the hashes of its snapshots, then delete the
        oldest checkpoint.
        """
        self._finish()
        # Not sorted: reading must give the same order.
        text = json.dumps({**state, "random": random_state()}, allow_nan=False)
        snapshots = [item.name for item in self.current_snapshots()]
        self.writing = self.thread.submit(self._write, step, self.copies.of(tensors), text, snapshots)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        try:
            self._finish()
        finally:
            self.thread.shutdown()

    def _finish(self) -> None:
        """Wait for the write under way; ValueError, with the remedy, where it failed."""
        writing, self.writing = self.writing, None
        error = writing.exception() if writing is not None else None
        if error is not None:
            raise ValueError(
                f"{self.folder}: the last checkpoint could not be written ({type(error).__name__}: "
                f"{one_line(error, limit=300)}), so a run that is killed would lose what came after the one before it. "
                f"Remove the cause, such as a full disk, and run the same command again; it goes on from there."
            ) from error

    def _wait(self) -> None:
        """Wait for the write under way, before what it reads is changed; an error stays for `save` or `close`."""
        if self.writing is not None:
            wait([self.writing])

    def _write(self, step: int, tensors: Tensors, state: str, snapshots: Sequence[str]) -> None:
        with atomic_folder(self.folder / f"{self.unit}-{step:06d}") as temporary:
            write_tensors(temporary, tensors)
            write_text(temporary / STATE, state)
            files = {item.name: content_hash(item) for item in sorted(temporary.iterdir())}
            for name in snapshots:
                if name not in self.snapshot_hashes:
                    self.snapshot_hashes[name] = content_hash(self.snapshots / name)
            body = {"step": step, "files": files, "snapshots": self.snapshot_hashes}
            write_json(temporary / MANIFEST, {**body, "hash": json_hash(body)})
        for old in numbered_folders(self.folder)[:-KEPT]:
            shutil.rmtree(old)
        self._remove_unneeded_snapshots()

    def load(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, and one sentence per newer one that was refused. PassingFault, and nothing is
        moved, where one cannot be read.

        Where none is whole the run starts over, in a folder that contains only what was refused.
        """
        self._wait()
        loss = "nobody knows which of its checkpoints are whole, and they stay as they are"
        with reading(str(self.folder), loss=loss):
            whole, faults = self._find_whole()
        if whole is not None:
            refused = self._refuse(faults, "going on from the checkpoint before it")
            with reading(str(whole), loss="nothing can go on from this checkpoint, which is whole"):
                return self._read(whole), refused
        rest = "no checkpoint is left, so the run starts over"
        if faults and self.snapshots.exists():  # first: the checkpoints show these are no leftovers
            rest += f"; its snapshots were moved to {self._move_aside(self.snapshots)}"
        shutil.rmtree(self.snapshots, ignore_errors=True)  # of a run killed before its first checkpoint
        return None, self._refuse(faults, rest)

    def _find_whole(self) -> tuple[Path | None, dict[Path, str]]:
        """The newest whole one, and what is wrong with each newer one."""
        faults: dict[Path, str] = {}
        for folder in reversed(numbered_folders(self.folder)):
            fault = self._fault(folder)
            if fault is None:
                return folder, faults
            faults[folder] = fault
        return None, faults

    def current_snapshots(self) -> list[Path]:
        self._wait()
        return [item for item in numbered_folders(self.snapshots) if item.name not in self.given_up]

    def give_up_snapshot(self, name: str) -> None:
        self._wait()
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
            try:
                needed |= set(read_json(folder / MANIFEST)["snapshots"])
            except (*NOT_THERE, ValueError, KeyError, TypeError):
                continue  # a torn one lists nothing
            except OSError:
                return  # one that cannot be read now may need any; the next checkpoint asks again
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
        except (*NOT_THERE, ValueError, KeyError, TypeError, AttributeError):
            return f"{MANIFEST} is missing or torn"
        return None

    def _read(self, folder: Path) -> Checkpoint:
        manifest, state, tensors = read_json(folder / MANIFEST), read_json(folder / STATE), read_tensors(folder)
        restore_random_state(state.pop("random"))
        self.snapshot_hashes = dict(manifest["snapshots"])
        # Written after this checkpoint or given up before it: the run writes what it needs again.
        self.given_up = {item.name for item in numbered_folders(self.snapshots)} - self.snapshot_hashes.keys()
        self._remove_unneeded_snapshots()
        return Checkpoint(int(manifest["step"]), tensors, state)


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
    # A run may go on with fewer devices, or more: those without a state keep the one of the run's seed.
    for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_bytes(text), device)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
