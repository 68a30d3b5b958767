"""Log-probs in chunks against those of one forward: values and every gradient, over families that change their logits
after the head, with tied and untied heads, a bias, autocast and bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tasks.learning.shared import policy
from tasks.learning.shared.batching import MicroBatch, micro_batches
from tasks.learning.shared.chunked_head import LOGIT_BYTES, Chunks, chunk_size
from tasks.learning.shared.policy import token_entropy, token_logp
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import Autocast
from tests.contracts.families import FAMILIES, Family

pytestmark = pytest.mark.slow
TIED = {"tie_word_embeddings": True}
HEADS = {
    "granite": FAMILIES["granite"],
    "cohere": FAMILIES["cohere"],
    "gemma2, capped": FAMILIES["gemma2, logits capped alone"],
    "qwen2, tied": Family("qwen2", TIED),
    "llama, untied": Family("llama", {"tie_word_embeddings": False}),
    "phi, a bias": Family("phi"),
}


def a_batch() -> MicroBatch:
    """Two trajectories with a common prefix of 6 tokens: 25 predicting positions, 30 sampled tokens."""
    generator = torch.Generator().manual_seed(1)
    shared, *tails = (torch.randint(3, 200, (count,), generator=generator).tolist() for count in (6, 14, 11))
    rows = [Row(shared + tail, [False] * 3 + [True] * (3 + len(tail)), [0.0] * (6 + len(tail)), 1.0) for tail in tails]
    (batch,) = micro_batches([rows], packing="tree", max_tokens=200, device=torch.device("cpu"))
    return batch


def logp_and_gradients(model: PreTrainedModel, autocast: Autocast) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = a_batch()
    model.zero_grad()
    logp_M = token_logp(model, batch, temperature=0.7, autocast=autocast)
    (logp_M * torch.linspace(-1, 2, batch.num_tokens)).sum().backward()
    return logp_M.detach(), {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found[name], gradient, atol=4e-6 * scale, rtol=1e-6)


def in_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(policy, "chunk_size", lambda vocabulary, device: size)


def test_chunks_change_no_entropy_which_is_that_of_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = HEADS["cohere"].model(), a_batch()
    whole_M = token_entropy(model, batch, temperature=0.7)
    in_chunks(monkeypatch, 4)
    torch.testing.assert_close(token_entropy(model, batch, temperature=0.7), whole_M)


@pytest.mark.parametrize("name", HEADS)
def test_chunks_change_no_log_prob_and_no_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 to 1e-6 of the largest gradient, in chunks of 4 and of 1 position."""
    model = HEADS[name].model()
    logp, gradients = logp_and_gradients(model, "none")
    for size in (4, 1):
        in_chunks(monkeypatch, size)
        found, others = logp_and_gradients(model, "none")
        torch.testing.assert_close(found, logp, atol=1e-6, rtol=1e-6)
        assert_same(others, gradients)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, "bfloat16"), (torch.bfloat16, "none")])
def test_in_bfloat16_the_sum_over_chunks_rounds_no_more_than_one_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, autocast: Autocast
) -> None:
    """Against float32: the gradient of the head in chunks is as near as that of one chunk."""
    exact = logp_and_gradients(HEADS["llama, untied"].model(), "none")[1]["lm_head.weight"]
    model = HEADS["llama, untied"].model().to(dtype)
    errors = []
    for size in (1000, 4):
        in_chunks(monkeypatch, size)
        gradient = logp_and_gradients(model, autocast)[1]["lm_head.weight"]
        assert gradient.dtype == dtype
        errors.append((gradient.float() - exact).norm().item() / exact.norm().item())
    assert errors[1] < 1.05 * errors[0] < 0.1


def test_a_frozen_head_gets_no_gradient_and_the_layers_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HEADS["llama, untied"].model()
    model.lm_head.requires_grad_(False)
    _, gradients = logp_and_gradients(model, "none")
    in_chunks(monkeypatch, 4)
    _, others = logp_and_gradients(model, "none")
    assert "lm_head.weight" not in others
    assert_same(others, gradients)


def test_chunks_are_cut_by_positions_and_have_their_tokens() -> None:
    """Positions 0 0 1 2 2 3 of four, two per chunk: three tokens, then three."""
    position, target = torch.tensor([0, 0, 1, 2, 2, 3]), torch.arange(10, 16)
    found: list[Any] = [
        (at, tokens, local.tolist(), ids.tolist()) for at, tokens, local, ids in Chunks(position, target, 4, 2)
    ]
    assert found == [
        (slice(0, 2), slice(0, 3), [0, 0, 1], [10, 11, 12]),
        (slice(2, 4), slice(3, 6), [0, 0, 1], [13, 14, 15]),
    ]


def test_a_chunk_has_as_many_positions_as_its_bytes_hold_and_at_least_one() -> None:
    """64 MiB of float32 is 110 rows of 152,000 logits; a GPU's chunk is eight times as large."""
    assert chunk_size(152_000, torch.device("cpu")) == (64 << 20) // (4 * 152_000) == 110
    assert chunk_size(152_000, torch.device("cuda")) == LOGIT_BYTES["cuda"] // (4 * 152_000) == 883
    assert chunk_size(1 << 40, torch.device("cpu")) == 1
