"""One contract over model families, tiny and random: trainer, engine and the model's own forward agree over 40 tokens,
or the model is refused and the reason named.

`families.py` declares which.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.chat.template import ChatTemplate
from tasks.engines.transformers.engine import TransformersEngine
from tasks.learning.shared.agreement import check_trainer
from tasks.learning.shared.batching import micro_batches
from tasks.learning.shared.policy import token_logp
from tasks.learning.shared.rows import Row
from tasks.learning.shared.settings import Packing
from tasks.models.architecture import own_logp
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.rollouts.engine import TurnRequest
from tests.chat import templates
from tests.chat.thinking_templates import thinking_tokenizer
from tests.conftest import ROOT
from tests.contracts.families import FAMILIES, LENGTH, ROWS, table
from tests.contracts.families import Row as Shown

TOLERANCE = 1e-3  # nats


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_model_that_takes_no_attention_from_outside_is_refused_when_it_is_loaded(tmp_path: Path):
    config = AutoConfig.for_model("falcon", vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="falcon"):
        load_model(tmp_path, compute=on_cpu(1))


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.template], ids=lambda row: row.shown)
def test_a_familys_template_shows_its_calls_and_its_thoughts_as_declared(row: Shown):
    name = str(row.template)
    template = getattr(templates, name) if name.isupper() else templates.published(name)
    words, _ = thinking_tokenizer(template)
    chat = ChatTemplate(words, source=name)
    assert (chat.call_format.name, chat.thinking is not None) == (row.calls, row.thinks)


def test_the_table_of_families_is_what_the_contract_declares():
    """`python -m tests.benchmarks.families` prints it."""
    assert table() in (ROOT / "infra" / "benchmarks.md").read_text(encoding="utf-8")


def an_engine(model: PreTrainedModel) -> TransformersEngine:
    return TransformersEngine(
        model, end_ids=(), temperature=1.0, top_p=1.0, stop=None, max_context=LENGTH, max_concurrent_episodes=2,
        kv_cache_bytes=None, num_threads=1,
    )  # fmt: skip
