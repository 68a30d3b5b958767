"""What weight decay is applied to."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tasks.learning.shared.optimizer import Optimizer
from tests.learning.options import supervised


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_matrices_and_embeddings_decay_and_norms_and_biases_do_not(optimizer: str) -> None:
    """A step with a gradient of zero is decay alone: with rate 0.5 and decay 0.5, what decays loses a quarter."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    # As in gpt-oss, where the biases of a layer's experts are one matrix.
    model.transformer.h[0].experts_bias = torch.nn.Parameter(torch.ones(3, 8))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    settings = supervised(optimizer=optimizer, schedule="constant", learning_rate=0.5, weight_decay=0.5)
    Optimizer(model, settings, num_steps=1).step(position=0)
    for name, parameter in model.named_parameters():
        is_kept = "bias" in name or "ln_" in name
        assert torch.equal(parameter, torch.full_like(parameter, 1.0 if is_kept else 0.75)), name
