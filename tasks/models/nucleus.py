"""Which tokens top-p leaves out: one definition for the engine that samples and the trainer that differentiates."""

from __future__ import annotations

import torch
from torch import Tensor


def outside_nucleus(logp_NV: Tensor, top_p: float | Tensor) -> Tensor:
    """[N, V], True where a token is not in the smallest set of likeliest tokens whose probability reaches `top_p`.

    `logp_NV` are log-probs in nats, normalised over V. Source: Holtzman et al., arXiv:1904.09751 section 3.1.
    """
    sorted_logp, order = logp_NV.sort(dim=-1, descending=True)
    probability = sorted_logp.exp()
    is_cut = probability.cumsum(-1) - probability >= top_p
    return torch.zeros_like(is_cut).scatter(-1, order, is_cut)
