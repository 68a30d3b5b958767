"""The train step of `packing.py` on a CUDA GPU: a model of 1.5 billion parameters, trees through FlexAttention.

Random weights in the shape of Qwen2.5-1.5B, float32 with bfloat16 autocast as the trainer runs it, a vocabulary of
151,936. MFU is the operations that distinct tokens need, forward and backward (`floor.py`), over time and over the rate
at which this card multiplies bfloat16 matrices. Rows are there one at a time, since that is what surely fits. Left out:
rollouts, and cards with too little memory (about 60 GB), for which the answer is a sentence.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tasks.core.records import Group
from tasks.learning.grpo.trainer import GRPOTrainer
from tasks.learning.shared.rows import rows_of
from tasks.learning.shared.settings import Packing
from tasks.models.attention import ATTENTION, register_attention
from tasks.models.settings import ComputeSettings
from tests.benchmarks.floor import matrix_rate, train_operations, tree_work
from tests.benchmarks.made_up import random_group
from tests.benchmarks.packing import GROUP_SIZE, PROMPT, SAMPLED
from tests.learning.options import grpo

ON_CUDA = ComputeSettings(device="cuda", num_threads=1, weights="float32", frozen="float32", offload="none", tf32=False)
VOCABULARY = 151_936
WARM_UP, COUNTED = 2, 3  # steps; the first compiles
MATRIX_SIZES = (4096, 8192)


def measure() -> dict[str, Any] | str:
    """Seconds, memory and MFU of both packings; a sentence where there is no card or it is too small."""
    if not torch.cuda.is_available():
        return "not measured: there is no CUDA GPU here"
    try:
        return _measure()
    except torch.cuda.OutOfMemoryError:
        return f"not measured: {torch.cuda.get_device_name()} has too little memory"


def _measure() -> dict[str, Any]:
    model = qwen_like()
    group = random_group(prompt=PROMPT, sampled=SAMPLED, size=GROUP_SIZE, vocabulary=VOCABULARY)
    of_group = [row for item in group.trajectories for row in rows_of(item, 1.0)]
    operations = train_operations(model, tree_work([of_group]))
    rate = matrix_rate(torch.bfloat16, sizes=MATRIX_SIZES, device="cuda")
    tree, rows = timed(model, group, "tree", PROMPT + GROUP_SIZE * SAMPLED), timed(model, group, "none", 1)
    return {
        "card": torch.cuda.get_device_name(),
        "parameters": sum(item.numel() for item in model.parameters()),
        "matrix_rate": rate,
        "operations": operations,
        "tree": tree,
        "rows": rows,
        "speedup": rows["seconds"] / tree["seconds"],
        "memory_ratio": tree["step_mb"] / rows["step_mb"],
        "mfu": operations / tree["seconds"] / rate,
    }


def qwen_like() -> PreTrainedModel:
    register_attention()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config)
    model.set_attn_implementation(ATTENTION)
    return model.eval()


def timed(model: PreTrainedModel, group: Group, packing: Packing, max_tokens: int) -> dict[str, float]:
    """Best seconds of a step, and the memory it takes above weights and optimizer."""
    options = grpo(
        packing=packing,
        micro_batch_tokens=max_tokens,
        autocast="bfloat16",
        updates_per_batch=1,
        kl_weight=0.0,
        learning_rate=0.0,
        num_iterations=WARM_UP + COUNTED,
    )
    trainer = GRPOTrainer(model, options, compute=ON_CUDA, temperature=1.0, max_tokens=PROMPT + SAMPLED)
    seconds = []
    for _ in range(WARM_UP + COUNTED):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        start = time.perf_counter()
        trainer.iterate(lambda *_: [group])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"seconds": min(seconds[WARM_UP:]), "step_mb": peak}


if __name__ == "__main__":
    print(json.dumps(measure()))
