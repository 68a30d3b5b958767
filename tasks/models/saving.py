"""A model's weights and configs as files: as `save_pretrained` writes them, but in any dtype, a shard at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tasks.core.files import write_json
from tasks.core.text import one_line
from tasks.models.files import GENERATION, INDEX, SINGLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_SHARD_BYTES = 2 << 30  # of one file: what saving a model holds in memory beside it


def save_model(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    save_configs(folder, model, dtype)
    write_shards(folder, _tensors_to_save(model).items(), dtype)


def save_configs(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The generation config as it was published: its `save_pretrained` refuses what transformers only warns of where it
    loads it, such as Vicuna's temperature without `do_sample` or Llama's pad_token_id of -1.
    """
    config = copy.deepcopy(model.config)
    config.dtype, config.architectures = str(dtype).removeprefix("torch."), [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.to_json_file(folder / GENERATION, keys_to_pop=["compile_config"])


def rehearse_saving(start: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError, before anything is trained, where what a snapshot takes from `start` cannot be written again."""
    try:
        with silence(), TemporaryDirectory() as temporary:
            save_configs(Path(temporary), model, model.dtype)
            tokenizer.save_pretrained(temporary)
    except OSError:  # of the temporary folder
        raise
    except Exception as error:  # transformers has many kinds
        raise ValueError(
            f"{start}: transformers reads its configuration and tokenizer but cannot write them again "
            f"({one_line(error)}), so no snapshot could be saved after training. Correct what it names in a copy of "
            f"the folder, and set model.path to that."
        ) from None


@contextmanager
def silence() -> Iterator[None]:
    """No progress bar, and no table of what the error message says in one line."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.enable_progress_bar()
        logging.set_verbosity(level)


def _tensors_to_save(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's own tensors under the names of its published files; of tied ones, one."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    unsaved = model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in unsaved}
    return dict(revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model)))


def stored_as(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype` for floating point (None: the tensor's own); anything else keeps its own."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> None:
    """Safetensors files of at most MAX_SHARD_BYTES, or of one tensor that is larger, and the index of several. One is
    in memory at a time.
    """
    from safetensors.torch import save_file

    names_in: list[list[str]] = []
    num_bytes = 0
    for number, shard in enumerate(_shards(tensors, dtype)):
        save_file(shard, folder / _unfinished(number), metadata={"format": "pt"})
        names_in.append([*shard])
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # or two shards would be in memory
    _name_shards(folder, names_in, num_bytes)


def _shards(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[dict[str, Tensor]]:
    """In host memory. A tensor is cast when it is known to which shard it belongs."""
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        target = stored_as(tensor, dtype)
        size = tensor.numel() * target.itemsize
        if shard and num_bytes + size > MAX_SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor.to("cpu", target).contiguous()
        num_bytes += size
    yield shard


def _name_shards(folder: Path, names_in: Sequence[Sequence[str]], num_bytes: int) -> None:
    """As published models name them, which takes their count."""
    count = len(names_in)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for number, file in enumerate(files if count > 1 else [SINGLE]):
        (folder / _unfinished(number)).rename(folder / file)
    if count > 1:
        places = {name: file for file, names in zip(files, names_in, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": places})


def _unfinished(number: int) -> str:
    return f"shard-{number}.unfinished"
