"""The files of a model folder: their hash, which are weights, whether loading used all, and whether they need custom
code.

The hash of the safetensors files names the weights, so nothing else may be loaded: no pickle, no shard outside the
folder, no tensor made up because the files lack it, no Python of the model's author. `files_hash` covers everything,
since behaviour also depends on configuration, chat template and tokenizer. Loading, pointers and adapters are in
`models/folders.py`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tasks.core.files import content_hash, link_or_copy, names_in, read_json
from tasks.core.passing_faults import PassingFault, is_passing
from tasks.core.text import first_few, one_line

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
GENERATION = "generation_config.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names: torch's
CAST = {*DTYPES, "F64"}  # to one of those, by loading
KEPT_BESIDE = ("BOOL", "I32", "I64")  # masks and positions
# Top-level names that are no part of the model: notes of `hf download` and git, which contain dates, and what the
# registry adds about a version and MLflow, which it verifies itself.
NOT_OF_THE_MODEL = (".cache", ".git", "lineage", "MLmodel", "components", "registered_model_meta")
POINTER = "pointer.json"  # says where the weights are, in a folder without any
ADAPTER_BASE = "base.json"  # says where the base model of a LoRA adapter is
LINEAGE = "lineage"  # the folder of a registered version that says how it came about
TRAINED_ON = "trained_on.json"  # ours: neither transformers nor vLLM reads it (`trained_on.py`)
HASH_AS_NAME = re.compile("[0-9a-f]{30,64}")  # of DVC's cache without the two letters of its folder
MAX_NAMES = 4
GET_ANOTHER = "Fetch the folder again from where it came, or run the stage that wrote it again."


def is_of_the_model(file: Path, folder: Path) -> bool:
    return file.relative_to(folder).parts[0] not in NOT_OF_THE_MODEL


def files_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of every file of the model in this very folder, subfolders included.

    A link to a file counts as that file. ValueError for a broken link, a link to a folder or a special file: a copy of
    the folder would differ; and for a link to a file elsewhere, unless that is in a cache of files named by their hash,
    as Hugging Face's and DVC's are.
    """
    for item in folder.rglob("*"):
        is_link, is_file = item.is_symlink(), item.is_file()
        if not is_file and (is_link or not item.is_dir()):
            raise ValueError(
                f"{item}: is not a regular file (a link to a folder, a broken link, or something else), so a copy of "
                f"the model would differ from it. Replace links by the files themselves: cp -rL {folder} COPY"
            )
        if is_link and is_of_the_model(item, folder) and _leads_elsewhere(item, folder):
            raise ValueError(
                f"{item}: is a link to {item.resolve()}, which is no file of the model, and the registry would store "
                f"and serve it. If it belongs to the model, take a copy of the folder: cp -rL {folder} COPY"
            )
    return content_hash(folder, ignore=lambda file: not is_of_the_model(file, folder))


def _leads_elsewhere(link: Path, folder: Path) -> bool:
    file = link.resolve()
    return not (file.is_relative_to(folder.resolve()) or HASH_AS_NAME.fullmatch(file.name))


@contextmanager
def only_the_model(folder: Path) -> Iterator[Path]:
    """A folder with exactly the files of `files_hash`: this one, or links to them where there are others."""
    if not any((folder / name).exists() for name in NOT_OF_THE_MODEL):
        yield folder
        return
    with TemporaryDirectory() as temporary:
        target = Path(temporary) / folder.name
        shutil.copytree(
            folder,
            target,
            copy_function=lambda source, copy: link_or_copy(os.path.realpath(source), copy),
            ignore=lambda place, names: NOT_OF_THE_MODEL if Path(place) == folder else (),
        )
        yield target


def weight_files(folder: Path, *, is_adapter: bool) -> list[Path]:
    """ValueError where a file is missing, or where transformers and vLLM would read different ones."""
    there = names_in(folder, ".safetensors")
    names = [ADAPTER] if is_adapter else _read_index(folder) if (folder / INDEX).exists() else [SINGLE]
    if not there:
        raise ValueError(
            f"{folder}: contains no *.safetensors file, so it is not a model turnwise can load. Point model.path to a "
            f"Hugging Face folder with safetensors weights, config.json and a tokenizer."
        )
    others = [name for name in there if name not in names]
    if SINGLE in others or (others and names == [SINGLE] and SINGLE in there):
        raise ValueError(
            f"{folder}: contains {_join(others)} and {_join(names)}, and transformers and vLLM do not agree on "
            f"which of them is the model. Keep one set of weights in the folder and move the other elsewhere."
        )
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(
            f"{folder}: its weights should be in {_join(missing)}, and there is no such file, so the model is not "
            f"whole. {GET_ANOTHER}"
        )
    return [folder / name for name in names]


def _read_index(folder: Path) -> list[str]:
    index = read_json(folder / INDEX)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ValueError(f"{folder / INDEX}: names no files under `weight_map`, as an index does. {GET_ANOTHER}")
    names = sorted(set(shards.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(
            f"{folder / INDEX}: names {_join(outside)}, which is not in the folder, so no hash of the folder would "
            f"cover it. {GET_ANOTHER}"
        )
    return names


def map_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a whole model's files by name, each mapped: they take no memory but the system's cache of files,
    and are read where they are copied.
    """
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in weight_files(folder, is_adapter=False):
        with loading(folder, file.name), safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def read_header(file: Path) -> list[tuple[str, str, list[int]]]:
    """(name, dtype such as BF16, shape) of each tensor in a safetensors file, without reading any."""
    from safetensors import safe_open

    with loading(file.parent, file.name), safe_open(file, framework="np") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return [(name, str(item.get_dtype()), list(item.get_shape())) for name, item in slices.items()]


def refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    """ValueError where the weights are in fewer bits than any dtype here: loading needs packages of their makers, and
    what would be trained or saved is not what the files contain.
    """
    found = config.get("quantization_config")
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ValueError(
            f"{folder}: its weights are quantized (quantization_config in config.json: {one_line(str(method))}), and "
            f"only float32, float16 and bfloat16 are played and trained here. Take the model it was made from."
        )


def refuse_other_dtypes(folder: Path, files: Iterable[Path]) -> None:
    """ValueError where a weight is of another dtype than those computed in here: quantized, whatever config.json says.
    Old folders keep masks and positions too, as integers.
    """
    for file in files:
        for name, dtype, _ in read_header(file):
            is_weight = name.endswith("weight") or not (dtype in KEPT_BESIDE or name.endswith(".bias"))
            if dtype not in CAST and is_weight:
                raise ValueError(
                    f"{folder}: {one_line(name)} in {file.name} is of dtype {dtype}, and only float32, float16 and "
                    f"bfloat16 are played and trained here. Take the model it was made from, or save it in bfloat16."
                )


def refuse_other_tensors(folder: Path, found: Mapping[str, Iterable[Any]]) -> None:
    """ValueError where loading left tensors of the model at random, or tensors of the files unused.

    `found` is from `from_pretrained(…, output_loading_info=True)`; it omits a tied head and what the architecture
    itself declares as needless.
    """
    problems = {
        "lack": list(found["missing_keys"]),
        "have in another shape": [key if isinstance(key, str) else key[0] for key in found["mismatched_keys"]],
        "also contain": list(found["unexpected_keys"]),
    }
    told = [f"{verb} {_join(sorted(names))}" for verb, names in problems.items() if names]
    if told:
        raise ValueError(
            f"{folder}: its weights are not those of the architecture in config.json: they {'; they '.join(told)}. "
            f"Missing tensors would be random numbers. {GET_ANOTHER}"
        )


def refuse_broken_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError where a number of a loaded tensor is NaN or infinite: so is every log-prob then. One pass over each,
    without a copy: 0.5 to 0.9 s per GB on one core, where torch.isfinite takes 10 to 14.
    """
    import torch

    for name, tensor in tensors:
        if tensor.numel() and not torch.stack(torch.aminmax(tensor.detach())).isfinite().all():
            raise ValueError(
                f"{folder}: its tensor {one_line(name)} contains a number that is not finite (NaN or infinite), so no "
                f"log-prob of the model is a number, with any engine. {GET_ANOTHER}"
            )


@contextmanager
def loading(folder: Path, what: str) -> Iterator[None]:
    """Errors of transformers, PEFT or safetensors as one line for people; PassingFault where a disk did not answer."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    own = (SafetensorError, StrictDataclassError)
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, *own) as error:
        if "trust_remote_code" in str(error):
            raise asks_to_run_code(folder, what) from None
        reason = one_line(f"{type(error).__name__}: {error}")
        if is_passing(error):
            raise PassingFault(
                f"{folder}: {what} cannot be read now ({reason}), so nothing was loaded. Where its disk answers, run "
                f"the same command again."
            ) from None
        raise ValueError(
            f"{folder}: {what} could not be loaded ({reason}). {GET_ANOTHER} If it is as its makers published it, "
            f"turnwise does not support its architecture."
        ) from None


def asks_to_run_code(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"{folder}: {what} is Python code of its own (`auto_map`), which could do anything on this machine, so "
        f"turnwise never runs it. Use a model whose architecture and tokenizer are part of transformers."
    )


def _join(names: list[str]) -> str:
    return first_few(names, MAX_NAMES)
