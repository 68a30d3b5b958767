"""What a config says that packing and the in-process engine do not compute; read before weights are loaded.

In packed trees and steps every position attends to all of its path, and positions of many episodes share one forward. A
window, a chunk, linear attention or a rotary embedding that depends on the longest position of a forward breaks that,
some only in long episodes, where no short comparison would see it. All else shows when log-probs are compared with the
model's own forward (architecture.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The positions that a config.json allows; None where it says nothing."""
    positions: int | None = config.get("text_config", config).get("max_position_embeddings")
    return positions


def check_trainable(config: PretrainedConfig, *, packing: str, max_tokens: int, key: str = "packing") -> None:
    """ValueError where the trainer would compute another distribution than the model's; `key` names the setting."""
    check_positions(config, max_tokens=max_tokens)
    reason = limited_attention(config, max_tokens=max_tokens) if packing == "tree" else None
    if reason is not None:
        raise ValueError(
            f"{key}: tree needs every token to attend to all before it, and this {config.model_type} model does not: "
            f"{reason}; tokens of one trajectory would leak into others or be lost. Set {key}: none."
        )


def check_playable(config: PretrainedConfig, *, max_tokens: int) -> None:
    """ValueError where the in-process engine would play episodes of up to `max_tokens` with another distribution."""
    check_positions(config, max_tokens=max_tokens)
    if reason := limited_attention(config, max_tokens=max_tokens):
        raise ValueError(
            f"engine.name: transformers lets every token attend to all before it, and this {config.model_type} model "
            f"does not: {reason}; another policy would be played. Set engine.name: vllm."
        )


def limited_attention(config: PretrainedConfig, *, max_tokens: int) -> str | None:
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


def _positive(config: PretrainedConfig, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def check_positions(config: PretrainedConfig, *, max_tokens: int) -> None:
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
