"""Model folders: what a stage may find there, how weights are loaded and saved, and the hash that names them.

A model folder is what `AutoModelForCausalLM.from_pretrained` loads: config.json, model.safetensors, tokenizer files. A
folder may instead hold only `pointer.json`, which says where the weights are, so that a stage with nothing to do copies
nothing; or a LoRA adapter and `base.json`, which names the model it belongs to. Only safetensors and JSON are read or
written; nothing is unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.runtime import prepare_torch
from tasks.storage import atomic_folder, content_hash, json_hash, read_json, require, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

POINTER, ADAPTER_BASE = "pointer.json", "base.json"
MODELS_FOLDER = "models"  # where a downloaded model is put; git ignores it
# `Qwen/Qwen2.5-1.5B-Instruct`, or the address of its page.
HUB_NAME = re.compile(
    r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)?(?P<owner>[\w-][\w.-]*)/(?P<name>[\w-][\w.-]*)/?"
)
# A key of tokenizer_config.json: the model learnt its tools from demonstrations, so no prompt is to describe them.
TOOLS_ARE_LEARNT = "tools_are_learnt"


def check_model_path(path: str) -> None:
    """ValueError with the way to get the model where `model.path` names nothing on this machine: no stage downloads."""
    place = Path(path)
    if place.exists():
        return
    if place.expanduser().exists():
        raise ValueError(
            f"model.path = {path!r} does not exist: `~` is not expanded there. Set model.path: {place.expanduser()}"
        )
    found = HUB_NAME.fullmatch(path)
    if found is None or found["owner"] == MODELS_FOLDER:
        raise ValueError(
            f"model.path = {path!r} does not exist, so the pipeline has nothing to work on. Correct the path: a "
            f"Hugging Face model folder, or tasks/learning/embedded_model.py. A model of the hub gets there by "
            f"`.venv/bin/hf download OWNER/NAME --local-dir {path}`."
        )
    folder = f"{MODELS_FOLDER}/{found['name']}"
    raise ValueError(
        f"model.path = {path!r} does not exist here; it looks like a name on the Hugging Face hub, and no stage "
        f"downloads a model, so that a run always trains what is on disk. Run `.venv/bin/hf download "
        f"{found['owner']}/{found['name']} --local-dir {folder}`, then set model.path: {folder}"
    )


def write_pointer(folder: Path, target: str) -> None:
    """Make `folder` stand for the model at `target`; the hash says at once if that model changes."""
    with atomic_folder(folder) as temporary:
        _write_target(temporary / POINTER, target)


def resolve_model(folder: Path) -> Path:
    """The folder that really holds the weights, pointers followed and their hashes checked."""
    require(folder)
    while (folder / POINTER).exists():
        folder = _read_target(folder, POINTER)
    return folder


def _write_target(file: Path, target: str) -> None:
    write_json(file, {"path": target, "weights_hash": weights_hash(Path(target))})


def _read_target(folder: Path, name: str) -> Path:
    pointer = read_json(folder / name)
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
    return target


def weights_hash(folder: Path) -> str:
    """SHA-256 over the safetensors files: the identity of a snapshot, whatever its folder is called. Of a LoRA adapter
    together with the model it belongs to.
    """
    folder = resolve_model(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder}: holds no *.safetensors file, so it is not a model turnwise can load. Point model.path to a "
            f"Hugging Face folder with safetensors weights, config.json and a tokenizer."
        )
    if is_adapter(folder):
        return json_hash([content_hash(*files), weights_hash(_read_target(folder, ADAPTER_BASE))])
    return content_hash(*files)


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a LoRA adapter instead of a whole model."""
    return (folder / ADAPTER_BASE).exists()


def model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, of the base where it holds an adapter."""
    folder = resolve_model(folder)
    return dict(read_json((_read_target(folder, ADAPTER_BASE) if is_adapter(folder) else folder) / "config.json"))


def load_model(folder: Path, *, num_threads: int) -> PreTrainedModel:
    """The causal language model of a folder in float32, an adapter merged in, ready to generate and to be trained."""
    prepare_torch(num_threads)
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.attention import ATTENTION, register_attention

    weights_hash(folder)
    folder = resolve_model(folder)
    if is_adapter(folder):
        return _load_merged(folder, num_threads=num_threads)
    register_attention()
    try:
        with _silence():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
            )
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        raise ValueError(
            f"{folder}: transformers gives {model_config(folder)['model_type']} models an attention of their own and "
            f"takes none from outside, so turnwise can neither play nor train one. Use another architecture."
        ) from None
    return model.eval()


def _load_merged(folder: Path, *, num_threads: int) -> PreTrainedModel:
    from peft import PeftModel

    base = load_model(_read_target(folder, ADAPTER_BASE), num_threads=num_threads)
    return PeftModel.from_pretrained(base, str(folder)).merge_and_unload().eval()


def merged_snapshot(snapshot: Path, folder: Path, *, num_threads: int) -> Path:
    """A folder with the whole model of a snapshot: its own, a pointer followed, or `folder` with its LoRA adapter
    merged into the base.
    """
    if not is_adapter(resolve_model(snapshot)):
        return resolve_model(snapshot)
    save_snapshot(folder, load_model(snapshot, num_threads=num_threads), load_tokenizer(snapshot))
    return folder


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


def save_adapter(folder: Path, save: Callable[[Path], None], tokenizer: PreTrainedTokenizerBase, *, base: Path) -> None:
    """Write a snapshot that holds a LoRA adapter alone, by `save`, and names the model it belongs to."""
    with _silence(), atomic_folder(folder) as temporary:
        save(temporary)
        tokenizer.save_pretrained(temporary)
        _write_target(temporary / ADAPTER_BASE, str(base))
        (temporary / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


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
