"""The engine generates with a model whose adapter is active in place: no merged copy of the weights."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tasks.engines.transformers.decode_step import Decoder
from tasks.engines.transformers.engine import TransformersEngine
from tasks.learning.shared.lora import POLICY, REFERENCE, Adapter
from tasks.models.folders import load_model
from tasks.models.settings import LoRASettings, on_cpu
from tasks.rollouts.engine import TurnReply, TurnRequest
from tests import tiny
from tests.engine_benches import plain_logp

pytestmark = pytest.mark.slow
PROMPT, REPLY = [*range(20, 40)], [*range(30, 60)]
LORA = LoRASettings(rank=4, alpha=8, target_modules="all-linear")


def turns(engine: TransformersEngine, episode: int) -> list[TurnReply]:
    """A prompt, and a reply long enough for a forward of its own."""
    replies = []
    for text in (PROMPT, REPLY):
        engine.submit(TurnRequest(episode, text, 6, seed=len(text)))
        replies += engine.poll()
    engine.release(episode)
    return replies


@torch.no_grad()
def write(adapter: Adapter, *, seed: int) -> None:
    """In place, as an optimizer does. B starts at 0, where an adapter changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter.tensors(POLICY).values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))


def merged_copy(folder: Path, adapter: Adapter) -> PreTrainedModel:
    merged = load_model(folder, compute=on_cpu(1))
    merged.load_state_dict(dict(adapter.merged(POLICY)), strict=False)
    return merged


@pytest.mark.parametrize("is_traced", [True, False])
def test_an_active_adapter_plays_as_the_merged_model(
    tmp_path: Path, is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after a step of the trainer, and after the reference's adapter was added beside the policy's."""
    if not is_traced:
        monkeypatch.setattr("tasks.engines.transformers.decode_step.is_traceable", lambda model: False)
    folder = tiny.model_folder(tmp_path / "m")
    base = load_model(folder, compute=on_cpu(1))
    adapter = Adapter(base, LORA, weights="float32")
    engine = TransformersEngine(
        base, end_ids=(), temperature=1.0, top_p=1.0, stop=None, max_context=80, max_concurrent_episodes=2,
        kv_cache_bytes=None, num_threads=1,
    )  # fmt: skip
    written: list[list[int]] = []
    with closing(engine):
        assert isinstance(engine.decoder, Decoder)  # an adapter's modules are not the family's own
        assert bool(engine.decoder.traced) is is_traced
        for seed in (1, 2):
            write(adapter, seed=seed)
            if seed == 2:
                adapter.add_copy(REFERENCE)
            engine.refresh(adapter.weights(POLICY), seed)
            first, second = turns(engine, seed)
            text = [*PROMPT, *first.token_ids, *REPLY, *second.token_ids]
            merged = plain_logp(merged_copy(folder, adapter), text)
            assert first.sampler_logp == pytest.approx(merged[19:25], abs=1e-5)
            assert second.sampler_logp == pytest.approx(merged[55:61], abs=1e-5)
            written.append(text)
    assert written[0] != written[1]
