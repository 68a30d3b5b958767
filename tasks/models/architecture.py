"""What a model's architecture needs that packing and the in-process engine do not compute, and the model's own
log-probs, against which trainer and engine are checked.

In packed trees and steps every position attends to all of its path, and positions of many episodes share one forward. A
window, a chunk or a rotary embedding that depends on the longest position of a forward breaks that only in long
episodes, where no short comparison would see it, so the config is read. All else shows when log-probs are compared with
the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tasks.core.text import one_line
from tasks.models.attention import UnknownAttention
from tasks.models.differences import Differences, tolerance_of

OWN_ATTENTION = "eager"  # transformers' reference, with soft caps and sinks
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def limited_attention(config: PreTrainedConfig, *, max_tokens: int) -> str | None:
    """Why a token of an episode of `max_tokens` may not attend to every token before it; None where it may."""
    config = config.get_text_config()
    window, chunk = _positive(config, "sliding_window"), _positive(config, "attention_chunk_size")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # as in Mistral, Phi-3 and StarCoder2
        kinds = ["sliding_attention"] if window and getattr(config, "use_sliding_window", True) else []
    reach = {"sliding_attention": ("sliding_window", window), "chunked_attention": ("attention_chunk_size", chunk)}
    for kind in sorted(set(kinds) - {"full_attention"}):
        name, size = reach.get(kind, ("", None))
        if not name:
            return f"it has layers of {kind}"
        if size is None or size < max_tokens:
            return f"it has layers of {kind} with {name} {size}, and episodes have up to {max_tokens} tokens"
    return None


def _positive(config: PreTrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def check_positions(config: PreTrainedConfig, *, max_tokens: int) -> None:
    """ValueError where a rotary embedding would make a token's log-prob depend on what shares its forward."""
    config = config.get_text_config()
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    layers = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]  # one per layer type
    for rope in layers:
        if rope.get("rope_type") not in LENGTH_DEPENDENT_ROPE:
            continue
        is_long = rope["rope_type"] == "longrope"
        original = rope["original_max_position_embeddings"] if is_long else config.max_position_embeddings
        if max_tokens > original:
            raise ValueError(
                f"{config.model_type}: its {rope['rope_type']} rotary embedding changes for all tokens of a forward "
                f"once one position is beyond the original context of {original}, and episodes have up to {max_tokens} "
                f"tokens, so a log-prob would depend on what shares its forward. Set sampling.max_tokens_per_episode "
                f"to at most {original}, or train another model."
            )


def check_own_forward(
    model: PreTrainedModel, gaps: Callable[[], Iterable[float]], *, who: str, harm: str, remedy: str
) -> None:
    """ValueError where `gaps`, of the log-probs of `who` from those of the model's own forward (nats), cannot be
    computed or are more than its dtype explains.
    """
    name, dtype = model.config.model_type, str(model.dtype).removeprefix("torch.")
    try:
        found = Differences.of(gaps())
    except (UnknownAttention, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: {who} cannot run this architecture ({type(error).__name__}: {one_line(error)}). {remedy}"
        ) from error
    if not found.is_within(tolerance_of(dtype)):
        raise ValueError(
            f"{name}: the log-probs of {who} differ from those of the model's own forward (nats: {found}; {dtype} "
            f"allows {tolerance_of(dtype)}), so {harm}. {remedy}"
        )


@torch.no_grad()
def model_logp(model: PreTrainedModel, sequences: Sequence[list[int]]) -> list[list[float]]:
    """Log-prob (nats) of every token but the first, by the model's plain forward, one sequence at a time."""
    rows = []
    for token_ids in sequences:
        ids_T = torch.tensor(token_ids, device=model.device)
        logp_TV = torch.log_softmax(model(input_ids=ids_T[None]).logits[0, :-1].float(), dim=-1)
        rows.append(logp_TV.gather(-1, ids_T[1:, None])[:, 0].tolist())
    return rows


def own_logp(model: PreTrainedModel, sequences: Sequence[list[int]]) -> list[list[float]]:
    """`model_logp` by transformers' own attention: quadratic memory, and nothing else may use the model meanwhile."""
    with _own_attention(model):
        return model_logp(model, sequences)


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
