"""One contract over model families, tiny and random: trainer, engine and the model's own forward agree over 40 tokens,
or the model is refused and the reason named.

The families are those that once trained or played another distribution unnoticed: by what they do to logits, by
windows of 8 tokens, by what they ask of attention, by positions that depend on the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.engines.transformers.engine import TransformersEngine
from tasks.learning.shared.agreement import check_trainer
from tasks.learning.shared.batching import Packing, Row, micro_batches
from tasks.learning.shared.policy import token_logp
from tasks.models.architecture import own_logp
from tasks.models.attention import ATTENTION, register_attention
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.rollouts.engine import TurnRequest

pytestmark = pytest.mark.slow
LENGTH, WINDOW, TOLERANCE = 40, 8, 1e-3
SMALL = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWED = {"tree": "sliding_window", "engine": "sliding_window"}  # transformers' own masks are right for rows
EVERYWHERE = ("tree", "none", "engine")
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A config, and what in the reason each of trainer (by packing) and engine refuses it with; none is agreement."""

    model_type: str
    changed: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def model(self) -> PreTrainedModel:
        register_attention()
        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **{**SMALL, **self.changed})
        return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).float().eval()


def capped(**changed: Any) -> dict[str, Any]:
    return {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0, **changed}


def experts(**changed: Any) -> dict[str, Any]:
    return {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None, **changed}


FAMILIES = {
    "granite": Family("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "cohere": Family("cohere", {"logit_scale": 0.1}),
    "gemma2, soft cap": Family("gemma2", capped(sliding_window=LENGTH), dict.fromkeys(EVERYWHERE, "softcap")),
    "gemma2, window": Family("gemma2", capped(sliding_window=WINDOW, attn_logit_softcapping=None), WINDOWED),
    "gemma2, logits capped alone": Family("gemma2", capped(sliding_window=LENGTH, attn_logit_softcapping=None)),
    "mistral": Family("mistral", {"sliding_window": None}),
    "mistral, window": Family("mistral", {"sliding_window": WINDOW}, WINDOWED),
    "mistral, window of an episode": Family("mistral", {"sliding_window": LENGTH}),
    "phi3": Family("phi3"),
    "phi3, window": Family("phi3", {"sliding_window": WINDOW}, WINDOWED),
    "phi3, longrope": Family(
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
        dict.fromkeys(EVERYWHERE, "longrope"),
    ),
    "starcoder2, dropout": Family("starcoder2", {"residual_dropout": 0.3, "attention_dropout": 0.3}),
    "starcoder2, window": Family("starcoder2", {"sliding_window": WINDOW}, WINDOWED),
    "stablelm": Family("stablelm", {}, {"tree": "nats", "engine": "stablelm"}),  # hands no plan on to its attention
    "gpt_oss": Family("gpt_oss", experts(sliding_window=LENGTH), dict.fromkeys(EVERYWHERE, "s_aux")),
    "gpt_oss, window": Family("gpt_oss", experts(sliding_window=WINDOW), {**WINDOWED, "none": "s_aux"}),
    "qwen2": Family("qwen2", {"sliding_window": WINDOW}),  # use_sliding_window is false, as in every Qwen 2 there is
    "qwen2, window": Family(
        "qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}, WINDOWED
    ),
    "llama, dynamic": Family(
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
        dict.fromkeys(EVERYWHERE, "dynamic"),
    ),
}


@pytest.mark.parametrize("packing", ["tree", "none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_trainer_computes_what_the_model_does_or_refuses_it(name: str, packing: Packing):
    family, model = FAMILIES[name], FAMILIES[name].model()
    if reason := family.refused.get(packing):
        with pytest.raises(ValueError, match=reason) as refused:
            check_trainer(model, packing=packing, max_tokens=LENGTH)
        assert "\n" not in str(refused.value)
        return
    check_trainer(model, packing=packing, max_tokens=LENGTH)
    generator = torch.Generator().manual_seed(1)
    shared, *tails = (torch.randint(3, 200, (count,), generator=generator).tolist() for count in (12, 28, 20))
    sequences = [shared + tail for tail in tails]
    rows = [
        Row(ids, [False] + [True] * (len(ids) - 1), [0.0, *logp], 1.0)
        for ids, logp in zip(sequences, own_logp(model, sequences), strict=True)
    ]
    (batch,) = micro_batches([rows], packing=packing, max_tokens=200, device=model.device)
    torch.testing.assert_close(token_logp(model, batch), batch.sampler_logp_M, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_computes_what_the_model_does_or_refuses_it(name: str):
    family, model = FAMILIES[name], FAMILIES[name].model()
    if reason := family.refused.get("engine"):
        with pytest.raises(ValueError, match=reason) as refused:
            an_engine(model)
        assert "\n" not in str(refused.value)
        return
    engine = an_engine(model)
    text: list[int] = []
    sampled: dict[int, float] = {}
    for read in ([*range(20, 32)], [*range(60, 68)]):  # then 10 tokens are written: 40 in all
        engine.submit(TurnRequest(1, read, max_new_tokens=10, seed=3))
        (reply,) = engine.poll()
        text += read
        sampled |= dict(enumerate(reply.sampler_logp, start=len(text)))
        text += reply.token_ids
    assert len(text) == LENGTH
    (own,) = own_logp(model, [text])
    assert [*sampled.values()] == pytest.approx([own[place - 1] for place in sampled], abs=TOLERANCE)


def test_a_model_that_takes_no_attention_from_outside_is_refused_when_it_is_loaded(tmp_path: Path):
    config = AutoConfig.for_model("falcon", vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="falcon"):
        load_model(tmp_path, compute=on_cpu(1))


def an_engine(model: PreTrainedModel) -> TransformersEngine:
    return TransformersEngine(
        model, end_ids=(), temperature=1.0, top_p=1.0, stop=None, max_context=LENGTH, max_concurrent_episodes=2,
        kv_cache_bytes=None, num_threads=1,
    )  # fmt: skip
