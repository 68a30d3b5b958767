"""What a tokenizer says of its tokens: which are special, and how ids become text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES_OF_A_CHARACTER, UNREADABLE = 4, "\ufffd"  # at most; what a part of one is decoded as


def plain_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str] | None:
    """What `decode` calls, without the checks of what it is given, which take twice as long; None for a family that
    decodes in its own way.
    """
    from transformers import PreTrainedTokenizerFast

    kind, names = type(tokenizer), ("decode", "_decode")
    is_plain = all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name) for name in names)
    return tokenizer.backend_tokenizer.decode if is_plain else None


def find_special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}


def control_tokens(tokenizer: PreTrainedTokenizerBase, scaffold: str) -> set[str]:
    """The special tokens, and added ones that occur in the template's text around messages."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special or str(token) in scaffold)
    return {token for token in (*tokenizer.all_special_tokens, *added) if token.strip()}


def any_of(tokens: set[str]) -> re.Pattern[str]:
    ordered = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
