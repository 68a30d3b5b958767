"""The policy's weights in a folder, for an engine that does not share the trainer's memory.

The copy has an output head of its own: where head and embedding are one tensor, vLLM's CPU kernels keep a packed copy
of the head that a reload never updates (1.6 nats off, without a warning). A folder appears whole or not at all; its
`weights.json` says which policy it is and how many tensors and bytes it has, so a reader notices a torn copy. The probe
(`probe.py`) checks that an engine took all of it.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import atomic_folder, read_json, write_json
from tasks.core.processes import is_gone, this_process
from tasks.engines.vllm.served_tensors import served_tensors, torch_dtype
from tasks.models.empty_model import streamed_weights
from tasks.models.files import read_header, weight_files
from tasks.models.folders import is_adapter, load_config, load_model, resolve_model
from tasks.models.policy_weights import PolicyWeights
from tasks.models.saving import write_shards
from tasks.models.settings import Dtype, on_cpu

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECORD = "weights.json"
OWNER = "owner.json"  # the process that an engine's folder is of
PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """What a whole copy contains: the policy's version, tensors, and safetensors files with their sizes (bytes)."""

    policy_version: int
    num_tensors: int
    file_sizes: dict[str, int]


class WeightsFolder:
    """The folder of one engine's weights, `<root>/<random>/weights/version-<version>-<export>`, deleted on close.

    Copies have the engine's `dtype` (`auto`: the trainer's). The last two exports are kept, the last two adapters too,
    whatever their versions (a rolled-back run counts from a lower one), and any that is being read. `logs`, beside the
    weights, is for the servers', and stays. Machines and containers may share `root`, and number their processes alike:
    so names are random, and only folders of processes that have certainly ended are deleted (`core/processes.py`).
    """

    def __init__(self, root: Path, tokenizer: PreTrainedTokenizerBase, *, dtype: str):
        self.tokenizer, self.dtype = tokenizer, torch_dtype(dtype)
        self.exports: list[Path] = []  # those not removed, the last one last
        self.adapters: list[Path] = []
        self.num_exports = 0
        self.num_readers: Counter[Path] = Counter()
        make_private(root)
        _remove_leftovers(root)
        self.home = root.resolve() / uuid.uuid4().hex[:12]
        self.folder, self.logs = self.home / "weights", self.home / "logs"
        self.home.mkdir(mode=PRIVATE)
        write_json(self.home / OWNER, this_process())
        self.folder.mkdir(mode=PRIVATE)

    def open_model(self, model_folder: Path) -> Path:
        """A folder to start an engine from: the model's own, or a copy with its own head and its adapter merged in.

        The copy is written a tensor at a time; only where the files' tensors are not the model's is it loaded.
        """
        resolved = resolve_model(model_folder)
        weight_files(resolved, is_adapter=is_adapter(resolved))  # refuses a folder where vLLM would load other files
        if not is_adapter(resolved) and not has_tied_head(resolved):
            return resolved.resolve()
        weights = streamed_weights(model_folder) or PolicyWeights.of(self._load(model_folder))
        return self.export(weights, policy_version=0)

    def export(self, weights: PolicyWeights, policy_version: int) -> Path:
        """Write `weights`; return their folder, which is never written again."""
        target = self._next("version", policy_version, self.exports)
        export_weights(target, weights, self.tokenizer, self.dtype, policy_version=policy_version)
        self.exports.append(target)
        return target

    def export_adapter(self, save: Callable[[Path], None], policy_version: int) -> Path:
        """A new path for each version: vLLM takes two adapters at one path for the same."""
        target = self._next("adapter", policy_version, self.adapters)
        with atomic_folder(target) as temporary:
            save(temporary)
        self.adapters.append(target)
        return target

    def _load(self, model_folder: Path) -> PreTrainedModel:
        """In host memory, in 16 bits where the engine computes in 16."""
        import torch

        dtype: Dtype = "float32" if self.dtype in (None, torch.float32) else "bfloat16"
        return load_model(model_folder, compute=on_cpu(torch.get_num_threads()), dtype=dtype)

    def _next(self, kind: str, policy_version: int, kept: list[Path]) -> Path:
        """Where the next one goes. All `kept` but the last are deleted first, so that two are on the disk at most."""
        for old in [folder for folder in kept[:-1] if not self.num_readers[folder]]:
            kept.remove(old)
            shutil.rmtree(old, ignore_errors=True)
        self.num_exports += 1
        return self.folder / f"{kind}-{policy_version:06d}-{self.num_exports}"

    def remove(self, export: Path) -> None:
        self.exports.remove(export)
        shutil.rmtree(export, ignore_errors=True)

    @contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """Inside, `folder` is not deleted: a server takes half a minute to start from it while exports go on."""
        self.num_readers[folder] += 1
        try:
            yield
        finally:
            self.num_readers[folder] -= 1

    def close(self) -> None:
        """Delete all but the logs, if there are any."""
        shutil.rmtree(self.folder if self.logs.exists() else self.home, ignore_errors=True)


def make_private(root: Path) -> None:
    """ValueError where another user owns the folder, and could put other weights there. A system folder must be
    sticky.
    """
    root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    found, ours = root.stat(), os.geteuid()
    is_sticky = bool(found.st_mode & stat.S_ISVTX)
    is_shared = bool(found.st_mode & 0o022) and not is_sticky
    owners = {found.st_uid, root.lstat().st_uid}  # of a link, too
    if owners == {ours} and not is_sticky:
        root.chmod(PRIVATE)
    elif owners - {0, ours} or is_shared:
        raise ValueError(
            f"engine.settings.folder = {str(root)!r} belongs to another user of this machine (number {max(owners)}), "
            f"who could swap the policy's weights there. Name a folder of your own, such as {root}-{ours}."
        )


def export_weights(
    folder: Path,
    weights: PolicyWeights,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
    *,
    policy_version: int,
) -> WeightsRecord:
    with atomic_folder(folder) as temporary:
        write_shards(temporary, served_tensors(weights, dtype), dtype)
        tokenizer.save_pretrained(temporary)
        weights.model.config.save_pretrained(temporary)
        config = read_json(temporary / "config.json")
        write_json(temporary / "config.json", _untied(config) | _described(weights.model, dtype))
        record = _describe(temporary, policy_version)
        write_json(temporary / RECORD, asdict(record))
    return record


def read_record(folder: Path) -> WeightsRecord:
    """The record of a copy; ValueError where the files differ from it."""
    record = WeightsRecord(**read_json(folder / RECORD))
    found = _describe(folder, record.policy_version)
    if found != record:
        raise ValueError(
            f"{folder}: contains {found.num_tensors} tensors in {sum(found.file_sizes.values())} bytes and {RECORD} "
            f"says {record.num_tensors} in {sum(record.file_sizes.values())}, so an engine would generate with damaged "
            f"weights. Another program writes to that folder, or the disk is full; give engine.settings.folder a "
            f"place of its own."
        )
    return record


def has_tied_head(folder: Path) -> bool:
    """Whether head and embedding share a tensor. Some families' configs say so by leaving it out."""
    config = load_config(folder)
    return any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    nested = {"text_config": text | {"tie_word_embeddings": False}} if isinstance(text, dict) else {}
    return config | nested | {"tie_word_embeddings": False}


def _described(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, Any]:
    """What `save_pretrained` of a model adds to its configuration."""
    return {
        "architectures": [type(model).__name__],
        "dtype": str(dtype or model.dtype).removeprefix("torch."),
    }


def _describe(folder: Path, policy_version: int) -> WeightsRecord:
    files = sorted(folder.glob("*.safetensors"))
    num_tensors = sum(len(read_header(file)) for file in files)
    return WeightsRecord(policy_version, num_tensors, {file.name: file.stat().st_size for file in files})


def _remove_leftovers(root: Path) -> None:
    for owner in root.glob(f"*/{OWNER}"):
        if _is_of_a_dead_process(owner):
            shutil.rmtree(owner.parent, ignore_errors=True)


def _is_of_a_dead_process(owner: Path) -> bool:
    try:
        return owner.lstat().st_uid == os.geteuid() and is_gone(read_json(owner))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # deleted meanwhile, or not written to its end
        return False
