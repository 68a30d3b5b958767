"""One token per row from logits, and the strings that end a turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tasks.chat.format import ChatFormat
from tasks.chat.tokens import BYTES_OF_A_CHARACTER, UNREADABLE
from tasks.models.nucleus import outside_nucleus


class StopStrings:
    """Whether a turn's newest token completes one of the strings, judged by its last few tokens.

    A token is at least one byte, so a string of B bytes is within the last B tokens; spare ones protect it from a
    tokenizer that decodes the first token of a text differently.
    """

    SPARE_TOKENS = 8

    def __init__(self, strings: Sequence[str], chat: ChatFormat):
        self.strings, self.chat = strings, chat
        self.num_tokens = max(len(text.encode()) for text in strings) + self.SPARE_TOKENS

    def found(self, token_ids: list[int]) -> bool:
        """Where the last tokens begin within a character, a decoder of byte tokens may show none of those after it."""
        for further in range(BYTES_OF_A_CHARACTER):
            text = self.chat.decode(token_ids[-self.num_tokens - further :])
            if any(string in text for string in self.strings):
                return True
            if UNREADABLE not in text:
                return False
        return False


def sample_tokens(
    logits_NV: Tensor, noise_N: Tensor, *, temperature: float | Tensor, top_p: float | Tensor
) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF: ids [N] and their log-probs [N] under the distribution actually sampled from.

    `noise_N` is uniform in [0, 1). The log-prob is after temperature and top-p (`outside_nucleus`, renormalised), as
    importance ratios need it. Temperature 0 is greedy, with log-prob 0: the likeliest token is certain. A tensor is a
    temperature above 0 or a top-p below 1: a traced step has no branch on its value.
    """
    logits_NV = logits_NV.float()
    if not isinstance(temperature, Tensor) and temperature == 0:
        likeliest_N = logits_NV.argmax(dim=-1)
        return likeliest_N, torch.zeros_like(likeliest_N, dtype=torch.float32)
    logp_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
    if isinstance(top_p, Tensor) or top_p < 1:
        logp_NV = torch.log_softmax(logp_NV.masked_fill(outside_nucleus(logp_NV, top_p), float("-inf")), dim=-1)
    cdf_NV = logp_NV.exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cdf_NV, noise_N.double()[:, None] * cdf_NV[:, -1:], right=True)
    tokens = tokens.clamp_(max=logits_NV.shape[-1] - 1)
    return tokens[:, 0], logp_NV.gather(-1, tokens)[:, 0]
