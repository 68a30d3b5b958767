"""An architecture without numbers: what its attention asks for is known before anything is loaded or started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tasks.chat.format import load_chat
from tasks.core.files import write_json
from tasks.models.empty_model import check_attention, empty_model, run_empty
from tasks.models.folders import load_model
from tasks.models.settings import on_cpu
from tasks.rollouts.load import load_engine
from tests import tiny
from tests.contracts.families import EXPERTS, FAMILIES, LATENT, SMALL
from tests.engine_benches import engine_settings, vllm_settings

LOOKS_AT_POSITIONS = ("phi3, longrope", "llama, dynamic")
CHOOSES_TOKENS = {**SMALL, **EXPERTS, **LATENT, "q_lora_rank": 16, "index_head_dim": 8, "index_n_heads": 2}


def write_config(folder: Path, model_type: str, values: Mapping[str, object]) -> Path:
    AutoConfig.for_model(model_type, **values).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_runs_to_its_end_without_numbers_and_none_that_works_is_refused(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    folder = write_config(tmp_path, family.model_type, {**SMALL, **family.changed})
    check_attention(folder)
    model = empty_model(folder, torch.bfloat16)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    if name in LOOKS_AT_POSITIONS:
        with pytest.raises(RuntimeError, match="meta"):
            run_empty(model)
    else:
        run_empty(model)


def test_what_attention_does_not_compute_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    """DeepSeek 3.2's attention is told which tokens to attend to. The folder has no weights to start with."""
    folder = tiny.model_folder(tmp_path / "m")
    write_config(folder, "deepseek_v32", CHOOSES_TOKENS | {"vocab_size": 700})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="DeepseekV32Attention asks its attention for indices") as refused:
        load_engine(
            folder,
            load_chat(folder),
            engine=engine_settings("vllm", vllm_settings(tmp_path / "weights")),
            sampling=tiny.SAMPLING,
            compute=on_cpu(1),
        )
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "weights").exists()


def test_an_empty_model_draws_no_random_number(tmp_path: Path) -> None:
    folder = tiny.model_folder(tmp_path / "m")
    before = torch.get_rng_state()
    check_attention(folder)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", ["awq", "fp8", "mxfp4"])
def test_quantized_weights_are_refused_where_they_are_loaded_and_before_an_engine_starts(
    tmp_path: Path, method: str
) -> None:
    folder = tiny.model_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"quantization_config": {"quant_method": method, "bits": 4}})
    for refuses in (check_attention, lambda folder: load_model(folder, compute=on_cpu(1))):
        with pytest.raises(
            ValueError, match=f"m: its weights are quantized .*{method}.*Take the model it was"
        ) as error:
            refuses(folder)
        assert "\n" not in str(error.value)
