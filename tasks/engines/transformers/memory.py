"""What bounds the memory of the in-process engine: the positions its KV cache may have, the tokens of one forward.

A forward over new tokens (prompts, long tool replies) holds their activations, and their keys and values until those
are copied into the cache; one over cached text also a mask of every new token against every position. The sizes come
from the model's config, so a forward is bounded in bytes: thousands of tokens for a model of 1.5B, which fill a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tasks.core.machine import GIB
from tasks.engines.transformers.decode_step import run_prefill

FORWARD_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
IN_STEP = 24  # tokens; a longer reply is not fed with the step, or all others would be padded to it
HIDDEN_COPIES, MLP_COPIES, MASK_COPIES = 8, 3, 3  # of a token's activations at the widest point of a layer
PADDING_FACTOR = 1.25  # texts whose lengths differ by less share a forward


@dataclass(frozen=True, slots=True)
class ForwardLimits:
    """Bytes one forward over new tokens may take: for each token, each row's logits, each pair of token and cached
    position, each cached position of a row. Replies of up to `in_step` tokens are fed with the step.
    """

    num_bytes: int
    per_token: int
    per_row: int = 0
    per_pair: int = 0
    per_position: int = 0
    in_step: int = IN_STEP

    def admits(self, num_rows: int, width: int, *, span: int = 0) -> bool:
        """One token of one row is always admitted."""
        row = width * (self.per_token + span * self.per_pair) + span * self.per_position + self.per_row
        return num_rows * row <= self.num_bytes or num_rows * width == 1

    def width(self, length: int, *, fed: int = 0) -> int:
        """How many of the next `length` tokens of a row with `fed` cached ones a forward takes."""
        low, high = 1, length
        while low < high:
            middle = (low + high + 1) // 2
            span = fed + middle if fed else 0
            low, high = (middle, high) if self.admits(1, middle, span=span) else (low, middle - 1)
        return low


@torch.no_grad()
def position_bytes(model: PreTrainedModel) -> int:
    """Of the keys and values of one token in all layers, by a forward: configs name their heads in many ways."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    return sum(tensor.numel() * tensor.element_size() for tensor in run_prefill(model, token, token[0]))


def forward_limits(model: PreTrainedModel, *, cached: int) -> ForwardLimits:
    config, size = model.config.get_text_config(), model.dtype.itemsize
    hidden = config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return ForwardLimits(
        num_bytes=FORWARD_BYTES[model.device.type],
        per_token=(HIDDEN_COPIES * hidden + MLP_COPIES * intermediate) * size + 2 * cached,
        per_row=config.vocab_size * size,
        per_pair=(MASK_COPIES + (key_heads if model.device.type == "cuda" else 0)) * size,
        per_position=-(-cached // config.num_hidden_layers),
    )


def batch_prompts(lengths: Sequence[int], limits: ForwardLimits) -> Iterator[list[int]]:
    """The numbers of prompts that share a forward, padded to its longest: all in their order where they fit, else those
    of similar length.
    """
    if not lengths:
        return
    if limits.admits(len(lengths), max(lengths)):
        yield [*range(len(lengths))]
        return
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if batch and not (
            lengths[batch[0]] <= PADDING_FACTOR * lengths[number] and limits.admits(len(batch) + 1, lengths[batch[0]])
        ):
            yield batch
            batch = []
        batch.append(number)
    yield batch


def batch_replies(lengths: Sequence[int], fed: Sequence[int], limits: ForwardLimits) -> tuple[list[int], int]:
    """The next forward over cached text: the numbers of the replies it continues, and how many tokens of each."""
    order = sorted(range(len(lengths)), key=lambda number: (lengths[number], fed[number]))
    first = order[0]
    width, batch = limits.width(lengths[first], fed=fed[first]), [first]
    if width < lengths[first]:
        return batch, width
    for number in order[1:]:
        wider = lengths[number]
        span = max(fed[item] for item in (*batch, number)) + wider
        if wider > PADDING_FACTOR * lengths[first] or not limits.admits(len(batch) + 1, wider, span=span):
            break
        batch.append(number)
    return batch, lengths[batch[-1]]


def smallest_cache(max_context: int, cached: int) -> int:
    """Bytes of one episode and as long a slot for padding."""
    return 2 * max_context * cached


def check_budget(kv_cache_bytes: int | None, *, max_context: int, cached: int) -> None:
    """ValueError where not even one episode fits; `cached` is the bytes of one position."""
    if kv_cache_bytes is None:
        return
    needed = smallest_cache(max_context, cached)
    if kv_cache_bytes < needed:
        raise ValueError(
            f"engine.settings.kv_cache_gib is {kv_cache_bytes / GIB:.4g}, and an episode of "
            f"sampling.max_tokens_per_episode = {max_context:,} tokens needs {needed / GIB:.4g} GiB: "
            f"2 × {max_context:,} × {cached:,} bytes, one half for padding, so it could never be played. Set "
            f"engine.settings.kv_cache_gib to at least that, or sampling.max_tokens_per_episode to at most "
            f"{kv_cache_bytes // (2 * cached):,}."
        )
