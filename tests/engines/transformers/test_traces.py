"""Engines over models of one structure share a trace, and none of them outlives its engine."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tasks.engines.transformers.decode_step import Decoder
from tasks.engines.transformers.traces import structure_of
from tasks.learning.shared.lora import Adapter
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tests import tiny
from tests.engines.transformers.test_lora import LORA


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("models")
    wider = tiny.EMBEDDED.model_copy(update={"intermediate_size": 128})
    return [
        tiny.model_folder(place / "one"),
        tiny.model_folder(place / "another"),
        tiny.model_folder(place / "wider", embedded=wider),
    ]


@pytest.mark.slow
def test_models_of_one_structure_share_their_traces_and_compute_with_their_own_weights(folders: list[Path]) -> None:
    one, another, wider = [load_model(folder, compute=on_cpu(1)) for folder in folders]
    with torch.no_grad():
        another.model.layers[0].self_attn.k_proj.weight.mul_(2)
    decoders = [Decoder(model, temperature=1.0, top_p=1.0) for model in (one, another, wider)]
    assert decoders[0].traced == decoders[1].traced
    assert not set(decoders[0].traced.values()) & set(decoders[2].traced.values())
    ids, places = torch.full((2, 5), 7), torch.arange(5)
    keys = [decoder.prefill(ids, places)[0].detach() for decoder in decoders[:2]]
    assert not torch.equal(*keys)
    for decoder, found in zip(decoders, keys, strict=False):
        decoder.traced_prefill = None
        assert torch.equal(decoder.prefill(ids, places)[0], found)


@pytest.mark.slow
def test_a_model_that_changed_shares_its_later_traces_with_none_that_did_not(folders: list[Path]) -> None:
    one, another = [load_model(folders[0], compute=on_cpu(1)) for _ in range(2)]
    changed = Decoder(one, temperature=1.0, top_p=0.5)
    one.train()
    changed.set_distribution(temperature=0.0, top_p=0.5)
    unchanged = Decoder(another, temperature=0.0, top_p=0.5)
    assert not set(changed.traced.values()) & set(unchanged.traced.values())


@pytest.mark.slow
def test_a_model_is_freed_with_its_engine(folders: list[Path]) -> None:
    model = load_model(folders[2], compute=on_cpu(1))
    freed = weakref.ref(model)
    Decoder(model, temperature=1.0, top_p=1.0)
    del model
    gc.collect()
    assert freed() is None


def test_whatever_a_trace_would_freeze_is_in_the_structure(folders: list[Path]) -> None:
    model = load_model(folders[0], compute=on_cpu(1))
    plain = structure_of(model)
    assert structure_of(model.train()) != plain
    assert structure_of(model.eval()) == plain
    assert structure_of(model.to(torch.bfloat16)) != plain


@pytest.mark.slow
def test_the_scale_of_an_adapter_is_in_the_structure(folders: list[Path]) -> None:
    found = set()
    for alpha in (8, 16):
        model = load_model(folders[0], compute=on_cpu(1))
        Adapter(model, LORA.model_copy(update={"alpha": alpha}), weights="float32")
        found.add(structure_of(model))
    assert len(found) == 2
