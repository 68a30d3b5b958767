"""Log-probs from a model's head a few positions at a time are those of its plain forward, in every family."""

from __future__ import annotations

import pytest
import torch

from tasks.models import architecture
from tasks.models.architecture import model_logp, own_logp
from tests.contracts.families import FAMILIES, LENGTH, SMALL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_by_the_head_in_chunks_are_those_of_the_plain_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 tokens, the logits of 7 at once; within 1e-4 nats of transformers' own attention."""
    model = FAMILIES[name].model()
    ids = torch.randint(3, SMALL["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    (own,) = own_logp(model, [ids])
    monkeypatch.setattr(architecture, "LOGIT_BYTES", 7 * 4 * SMALL["vocab_size"])
    (found,) = model_logp(model, [ids])
    assert found == pytest.approx(own, abs=1e-4)
