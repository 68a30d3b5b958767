"""Model folders: what they may contain, how weights are loaded and saved, and the hash that identifies them.

A model folder is what `AutoModelForCausalLM.from_pretrained` loads. It may instead contain only `pointer.json`, which
says where the weights are (and what `model.template` adds to them), so that a stage with nothing to do copies nothing;
or a LoRA adapter and `base.json`, which names its base model. Only safetensors and JSON are read or written: nothing is
unpickled, and no code of a model's author runs. Every `from_pretrained` of turnwise is here.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasks.core.files import atomic_folder, content_hash, json_hash, read_json, require, write_json
from tasks.core.text import one_line
from tasks.core.urls import local_path
from tasks.models.adapters import LoRAUpdate, merge_files, merge_into, read_update
from tasks.models.files import (
    ADAPTER_BASE,
    DTYPES,
    GENERATION,
    POINTER,
    TRAINED_ON,
    asks_to_run_code,
    files_hash,
    loading,
    read_header,
    refuse_broken_tensors,
    refuse_other_dtypes,
    refuse_other_tensors,
    refuse_quantized,
    weight_files,
)
from tasks.models.saving import save_model, silence
from tasks.models.settings import PLAIN_TEMPLATE, ComputeSettings, Dtype, TemplateSettings
from tasks.models.template import TEMPLATE, copy_stating, pointed_template, state_template, template_of
from tasks.models.tokenizer_files import check_tokenizer
from tasks.models.torch_setup import leave_out_sklearn, prepare_torch

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CONFIG = "config.json"
# A key of tokenizer_config.json: the model learnt its tools from demonstrations; prompts do not describe them.
TOOLS_ARE_LEARNT = "tools_are_learnt"
THOUGHTS_ARE_LEARNT = "thoughts_are_learnt"  # another: its demonstrations contain the environment's thoughts


def is_model(folder: Path) -> bool:
    """Whether it is one of the three: weights with their configuration, an adapter, or a pointer."""
    return any((folder / name).is_file() for name in (CONFIG, ADAPTER_BASE, POINTER))


def write_pointer(folder: Path, target: str, *, template: TemplateSettings = PLAIN_TEMPLATE) -> None:
    stated = {} if template == PLAIN_TEMPLATE else {TEMPLATE: template.model_dump()}
    with atomic_folder(folder) as temporary:
        _write_target(temporary / POINTER, target, **stated)


def resolve_model(folder: Path) -> Path:
    """The folder that contains the weights: follows pointers and checks their hashes."""
    require(folder)
    while (folder / POINTER).exists():
        folder = _read_target(folder, POINTER)
    return folder


def _write_target(file: Path, target: str, **stated: Any) -> None:
    write_json(file, {"path": target, "folder_hash": folder_hash(local_path(target)), **stated})


def _read_target(folder: Path, name: str) -> Path:
    pointer = read_json(folder / name)
    target = local_path(pointer["path"])
    if not target.exists():
        raise ValueError(
            f"{folder}: points to {target}, which does not exist, so there are no weights. "
            f"Restore that folder, or correct model.path and run the pipeline again."
        )
    if folder_hash(target) != pointer["folder_hash"]:
        raise ValueError(
            f"{target}: its files (weights, configuration or tokenizer) changed since {folder} was written, so results "
            f"would mix two models. Run the pipeline again; DVC reruns what depends on it."
        )
    return target


def weights_hash(folder: Path) -> str:
    """SHA-256 over the safetensors files, and of the base model for a LoRA adapter: the identity of a snapshot."""
    folder = resolve_model(folder)
    weight_files(folder, is_adapter=is_adapter(folder))
    files = sorted(folder.glob("*.safetensors"))
    if is_adapter(folder):
        return json_hash([content_hash(*files), weights_hash(_read_target(folder, ADAPTER_BASE))])
    return content_hash(*files)


def folder_hash(folder: Path) -> str:
    """SHA-256 over every file of a model: equal weights may differ in configuration, chat template or tokenizer."""
    template = pointed_template(folder)
    if template != PLAIN_TEMPLATE:
        return json_hash([folder_hash(resolve_model(folder)), template.model_dump()])
    folder = resolve_model(folder)
    if is_adapter(folder):
        return json_hash([files_hash(folder), folder_hash(_read_target(folder, ADAPTER_BASE))])
    return files_hash(folder)


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_BASE).exists()


def model_config(folder: Path) -> dict[str, Any]:
    return dict(read_json(_config_folder(folder) / CONFIG))


def _config_folder(folder: Path) -> Path:
    folder = resolve_model(folder)
    return _read_target(folder, ADAPTER_BASE) if is_adapter(folder) else folder


def generation_end_ids(folder: Path) -> list[int]:
    """The ids that end a text of the model, from its generation_config.json; none where there is no such file."""
    file = _config_folder(folder) / GENERATION
    found = read_json(file).get("eos_token_id") if file.exists() else None
    return [token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)]


def load_config(folder: Path) -> PretrainedConfig:
    """With the defaults of its family, which a file may leave out."""
    from transformers import AutoConfig

    folder = _config_folder(folder)
    with loading(folder, f"its {CONFIG}"):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_model(
    folder: Path,
    *,
    compute: ComputeSettings,
    dtype: Dtype | None = None,
    load_base: Callable[..., PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """On `compute.device`, in `dtype` (None: `compute.weights`), its adapter merged into what `load_base` returns
    (None: this function). ValueError where the weights are not exactly the architecture's tensors.

    Each tensor goes from its mapped file to its device and dtype by itself: no other copy of the model is made.
    """
    device = prepare_torch(compute)
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.models.attention import ATTENTION, refuse_fixed_attention, register_attention

    weights_hash(folder)
    folder = resolve_model(folder)
    if is_adapter(folder):
        return _load_merged(folder, partial(load_base or load_model, compute=compute, dtype=dtype))
    refuse_quantized(folder, config := model_config(folder))
    refuse_other_dtypes(folder, weight_files(folder, is_adapter=False))
    register_attention()
    with refuse_fixed_attention(folder, config), silence(), loading(folder, "its model"):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype or compute.weights),
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, with names
            output_loading_info=True,
            device_map=None if device.type == "cpu" else {"": _with_index(device)},  # a map needs accelerate
        )
    refuse_other_tensors(folder, found)
    refuse_broken_tensors(folder, model.named_parameters())
    return model.eval()


def _with_index(device: torch.device) -> torch.device:
    """transformers copies weights in threads of its own, and in a new thread the GPU without a number is the first."""
    import torch

    return torch.device(device.type, torch.cuda.current_device())


def _load_merged(folder: Path, load_base: Callable[[Path], PreTrainedModel]) -> PreTrainedModel:
    base, updates = read_updates(folder)
    model, stored = load_base(base), stored_dtype(base)
    for update in updates:
        merge_into(model, update, dtype=stored)
    return model


def read_updates(folder: Path) -> tuple[Path, list[LoRAUpdate]]:
    """The whole model below an adapter, and what adapters add to it, the innermost first."""
    updates: list[LoRAUpdate] = []
    while is_adapter(folder):
        updates.insert(0, read_update(folder))
        folder = resolve_model(_read_target(folder, ADAPTER_BASE))
    return folder, updates


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of most bytes in the model's files, of its base's for an adapter; float32 if training knows no such."""
    import torch

    folder = resolve_model(folder)
    if is_adapter(folder):
        return stored_dtype(_read_target(folder, ADAPTER_BASE))
    sizes: Counter[str] = Counter()
    for file in weight_files(folder, is_adapter=False):
        for _, dtype, shape in read_header(file):
            sizes[dtype] += math.prod(shape)
    (most, _), *_ = sizes.most_common(1)
    return cast("torch.dtype", getattr(torch, DTYPES.get(most, "float32")))


def merged_snapshot(snapshot: Path, folder: Path, *, compute: ComputeSettings) -> Path:
    """The whole model of a snapshot: its own folder, a pointer's target, or `folder` with the adapter merged in,
    tensor by tensor and in the dtype of its base.
    """
    found = resolve_model(snapshot)
    if not is_adapter(found):
        if pointed_template(snapshot) == PLAIN_TEMPLATE:
            return found
        with atomic_folder(folder) as temporary:
            copy_stating(found, temporary, template_of(load_tokenizer(snapshot)))
        return folder
    weights_hash(found)  # refuses other files than those on record
    base, updates = read_updates(found)
    with silence(), atomic_folder(folder) as temporary:
        if merge_files(base, updates, temporary):
            _copy_files(base, temporary, (CONFIG, GENERATION))
        else:
            save_model(temporary, load_model(found, compute=compute), stored_dtype(base))
        load_tokenizer(snapshot).save_pretrained(temporary)
        _copy_files(found, temporary, (TRAINED_ON,))
    return folder


def _copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """ValueError for custom code: without it transformers silently takes a class that may cut text differently."""
    leave_out_sklearn()
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name

    resolved, template = resolve_model(folder), pointed_template(folder)
    check_tokenizer(resolved)
    try:
        config = get_tokenizer_config(resolved, local_files_only=True)
        name = str(config.get("tokenizer_class")).removesuffix("Fast")
        if config.get("auto_map") and not any(map(tokenizer_class_from_name, (name, f"{name}Fast"))):
            raise ValueError("trust_remote_code")
        tokenizer = AutoTokenizer.from_pretrained(resolved, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library below transformers raises nothing narrower
        if "trust_remote_code" in str(error):
            raise asks_to_run_code(resolved, "its tokenizer") from None
        raise ValueError(
            f"{resolved}: no tokenizer could be loaded ({one_line(error)}). Put the model's "
            f"tokenizer files beside its weights."
        ) from None
    state_template(tokenizer, template)
    return tokenizer


def load_fast_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """`load_tokenizer` for a folder turnwise wrote, without the four seconds of `AutoTokenizer`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def save_snapshot(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype | None = None
) -> None:
    """`dtype` is that of the files; None is the model's own."""
    with silence(), atomic_folder(folder) as temporary:
        save_model(temporary, model, dtype or model.dtype)
        tokenizer.save_pretrained(temporary)


def save_adapter(folder: Path, save: Callable[[Path], None], tokenizer: PreTrainedTokenizerBase, *, base: Path) -> None:
    with silence(), atomic_folder(folder) as temporary:
        save(temporary)
        tokenizer.save_pretrained(temporary)
        _write_target(temporary / ADAPTER_BASE, str(base))
        (temporary / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
