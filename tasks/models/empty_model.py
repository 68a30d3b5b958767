"""A model's architecture without numbers, from its config: what its attention is asked for before anything starts, and
its weights read from the files one tensor at a time.

It is on torch's device `meta`, so it takes no memory, and a forward computes shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.models.adapters import WEIGHT, LoRAUpdate, modules_in
from tasks.models.attention import ATTENTION, UnknownAttention, refuse_fixed_attention, register_attention
from tasks.models.files import loading, read_header, refuse_other_tensors, refuse_quantized, weight_files
from tasks.models.folders import (
    load_config,
    model_config,
    read_updates,
    resolve_model,
    stored_dtype,
)
from tasks.models.policy_weights import PolicyWeights
from tasks.models.torch_setup import leave_out_sklearn

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

NUM_TOKENS = 4


def empty_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """ValueError where transformers lets no other attention into the architecture, or config.json says that the weights
    are quantized.
    """
    import torch

    leave_out_sklearn()
    from transformers import AutoModelForCausalLM

    refuse_quantized(folder, stated := model_config(folder))
    register_attention()
    config = load_config(folder)
    with refuse_fixed_attention(folder, stated), loading(folder, "its model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION).eval()


def check_attention(folder: Path) -> None:
    """ValueError where the architecture asks its attention for something that turnwise's does not compute.

    A model that cannot run without numbers (some rotary embeddings look at positions) is checked as far as it gets; any
    is compared with its own forward once it is loaded.
    """
    import torch

    model = empty_model(folder, torch.bfloat16)
    try:
        run_empty(model)
    except UnknownAttention as refused:
        raise ValueError(f"{folder}: {refused}") from None
    except Exception:  # whatever it needs numbers for
        return


def run_empty(model: PreTrainedModel) -> None:
    """A forward. The mask is given, since transformers looks at numbers to make one."""
    import torch

    ids = torch.zeros((1, NUM_TOKENS), dtype=torch.long, device="meta")
    mask = torch.zeros((1, 1, NUM_TOKENS, NUM_TOKENS), dtype=model.dtype, device="meta")
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)


def check_tensors(folder: Path) -> None:
    """ValueError where the files of a whole model lack tensors of its architecture, or have them in another shape, by
    their headers. Nothing is said where they have names of their own too, as those of some families do: loading does.
    """
    import torch

    model = empty_model(folder, torch.bfloat16)
    own, tied = _own_shapes(model), model.all_tied_weights_keys
    files = weight_files(folder, is_adapter=False)
    found = {tied.get(name, name): shape for file in files for name, _, shape in read_header(file)}
    if not found.keys() <= own.keys():
        return
    others = [name for name, shape in found.items() if shape != own[name]]
    refuse_other_tensors(
        folder, {"missing_keys": own.keys() - found.keys(), "mismatched_keys": others, "unexpected_keys": []}
    )


def _own_shapes(model: PreTrainedModel) -> dict[str, list[int]]:
    """Of the tensors that its files contain, a tied one once."""
    tied = model.all_tied_weights_keys
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def streamed_weights(folder: Path) -> PolicyWeights | None:
    """The weights in a folder, adapters merged in and in the dtype of the base's files, each read when it is asked for.

    None where the files do not have exactly the model's tensors: some families' are joined or renamed at loading.
    """
    base, updates = read_updates(resolve_model(folder))
    files = weight_files(base, is_adapter=False)
    found = {name: (file, shape) for file in files for name, _, shape in read_header(file)}
    stored = stored_dtype(base)
    model = empty_model(base, stored)
    tied = model.all_tied_weights_keys
    if _own_shapes(model) != {name: shape for name, (_, shape) in found.items()}:
        return None
    for update in updates:
        update.refuse_other_modules(modules_in(files))
    model._weight_conversions = []  # transformers' note of a loaded model: the files have its own names

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in model.state_dict():
            source = tied.get(name, name)
            yield name, _read_merged(found[source][0], source, updates, stored)

    return PolicyWeights(model, tensors)


def _read_merged(file: Path, name: str, updates: Sequence[LoRAUpdate], stored: torch.dtype) -> Tensor:
    from safetensors import safe_open

    with loading(file.parent, file.name), safe_open(file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    module = name.removesuffix(WEIGHT)
    for update in updates:
        if name != module and module in update.modules:
            tensor = update.apply(tensor, module).to(stored)
    return tensor
