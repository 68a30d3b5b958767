"""Model folders: what a stage may find there, how weights are loaded and saved, and the hash that names them.

A model folder is what `AutoModelForCausalLM.from_pretrained` loads: config.json, model.safetensors, tokenizer files. A
folder may instead hold only `pointer.json`, which says where the weights are, so that a stage with nothing to do copies
nothing. Only safetensors and JSON are read or written; nothing is unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.runtime import prepare_torch
from tasks.storage import atomic_folder, content_hash, read_json, require, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

POINTER = "pointer.json"


def write_pointer(folder: Path, target: str) -> None:
    """Make `folder` stand for the model at `target`; the hash says at once if that model changes."""
    with atomic_folder(folder) as temporary:
        write_json(temporary / POINTER, {"path": target, "weights_hash": weights_hash(Path(target))})


def resolve_model(folder: Path) -> Path:
    """The folder that really holds the weights, pointers followed and their hashes checked."""
    require(folder)
    while (folder / POINTER).exists():
        pointer = read_json(folder / POINTER)
        target = Path(pointer["path"])
        if not target.exists():
            raise ValueError(
                f"{folder}: points to {target}, which does not exist, so there are no weights. "
                f"Restore that folder, or correct model.path and run the pipeline again."
            )
        if weights_hash(target) != pointer["weights_hash"]:
            raise ValueError(
                f"{target}: its weights changed since {folder} was written, so results would mix two models. "
                f"Run the pipeline again; DVC reruns what depends on it."
            )
        folder = target
    return folder


def weights_hash(folder: Path) -> str:
    """SHA-256 over the safetensors files: the identity of a snapshot, whatever its folder is called."""
    files = sorted(resolve_model(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder}: holds no *.safetensors file, so it is not a model turnwise can load. Point model.path to a "
            f"Hugging Face folder with safetensors weights, config.json and a tokenizer."
        )
    return content_hash(*files)


def load_model(folder: Path, *, num_threads: int) -> PreTrainedModel:
    """The causal language model of a folder in float32, ready for the in-process engine and for training."""
    prepare_torch(num_threads)
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.attention import ATTENTION, register_attention

    register_attention()
    weights_hash(folder)
    with _silence():
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model(folder), dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
        )
    return model.eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    resolved = resolve_model(folder)
    try:
        return AutoTokenizer.from_pretrained(resolved, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{resolved}: no tokenizer could be loaded ({' '.join(str(error).split())[:200]}). Put the model's "
            f"tokenizer files beside its weights."
        ) from None


def save_snapshot(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a folder that transformers and vLLM load as it is; the folder appears whole or not at all."""
    with _silence(), atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _silence() -> Any:
    """Loading a small local model needs no progress bar of its own among ours."""
    from contextlib import contextmanager

    from transformers.utils import logging

    @contextmanager
    def quiet() -> Any:
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.enable_progress_bar()

    return quiet()
