"""The model's own log-probs, against which trainer and engine are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tasks.core.text import one_line
from tasks.models.attention import UnknownAttention
from tasks.models.differences import Differences, NotFinite, refuse_what_is_not_finite, tolerance_of
from tasks.models.head import without_layers
from tasks.models.torch_setup import product_dtype

LOGIT_BYTES = 64 << 20  # of float32 logits at once: those of a long text beside an engine awake would not fit
OWN_ATTENTION = "eager"  # transformers' reference, with soft caps and sinks


def check_own_forward(
    model: PreTrainedModel, gaps: Callable[[], Iterable[float]], *, who: str, harm: str, remedy: str
) -> None:
    """ValueError where `gaps`, of the log-probs of `who` from those of the model's own forward (nats), cannot be
    computed or are more than its dtype explains.
    """
    name, dtype = model.config.model_type, str(model.dtype).removeprefix("torch.")
    try:
        found = Differences.of(gaps())
    except (NotFinite, UnknownAttention, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if _is_of_the_compiler(error):
            raise ValueError(
                f"{name}: this machine could not compile what {who} computes with ({one_line(error)}). Install gcc or "
                f"clang and Python's headers (Debian: python3-dev), or set train.packing: none."
            ) from error
        raise ValueError(
            f"{name}: {who} cannot run this architecture ({type(error).__name__}: {one_line(error)}). {remedy}"
        ) from error
    tolerance = tolerance_of(dtype, product_dtype(model.device))
    if not found.is_within(tolerance):
        raise ValueError(
            f"{name}: the log-probs of {who} differ from those of the model's own forward (nats: {found}; {dtype} "
            f"allows {tolerance}), so {harm}. {remedy}"
        )


def _is_of_the_compiler(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


@torch.no_grad()
def model_logp(model: PreTrainedModel, sequences: Sequence[list[int]]) -> list[list[float]]:
    """Log-prob (nats) of every token but the first, one sequence at a time and the logits of a few positions."""
    size, rows = max(1, LOGIT_BYTES // (4 * model.config.get_text_config().vocab_size)), []
    for token_ids in sequences:
        ids_T = torch.tensor(token_ids, device=model.device)
        chunks = zip(_logits(model, ids_T[:-1], size), ids_T[1:].split(size), strict=True)
        rows.append([logp for chunk in chunks for logp in _logp(*chunk)])
    return rows


def _logits(model: PreTrainedModel, ids_T: Tensor, size: int) -> Iterator[Tensor]:
    """After each position, `size` of them at a time; all at once where the family has no layers apart (Llama 4)."""
    layers = model.get_decoder()
    if layers is model:
        yield from model(input_ids=ids_T[None], use_cache=False).logits[0].split(size)
        return
    output = layers(input_ids=ids_T[None], use_cache=False)
    head = without_layers(model, layers, type(output))
    for hidden_CD in output.last_hidden_state[0].split(size):
        yield head(inputs_embeds=hidden_CD[None], use_cache=False).logits[0]


@torch.no_grad()
def own_logp(model: PreTrainedModel, sequences: Sequence[list[int]]) -> list[list[float]]:
    """The same by one plain forward with transformers' own attention, for short sequences: all logits at once and
    quadratic memory, and nothing else may use the model meanwhile. NotFinite where one is NaN or infinite.
    """
    with _own_attention(model):
        given = [torch.tensor(token_ids, device=model.device) for token_ids in sequences]
        rows = [_logp(model(input_ids=ids_T[None, :-1], use_cache=False).logits[0], ids_T[1:]) for ids_T in given]
    refuse_what_is_not_finite(rows, model=model.config.model_type)
    return rows


def _logp(logits_TV: Tensor, ids_T: Tensor) -> list[float]:
    return torch.log_softmax(logits_TV.float(), dim=-1).gather(-1, ids_T[:, None])[:, 0].tolist()


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    ours = model.config._attn_implementation
    model.set_attn_implementation(OWN_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def example_ids(config: PreTrainedConfig, count: int, *, start: int = 0) -> list[int]:
    """Token ids without equal neighbours, from the lower half of the vocabulary, where few are special."""
    half = max(2, config.get_text_config().vocab_size // 2)
    return [1 + (start + 7 * number) % (half - 1) for number in range(count)]
