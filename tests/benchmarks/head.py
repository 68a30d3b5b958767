"""Memory and seconds of log-probs and their gradient over a vocabulary of 151,936, for one way of cutting the logits.

Run as a program in a process of its own, since a peak never falls: `head.py POSITIONS CHUNK`. The model has the width
and the vocabulary of Qwen2.5-0.5B and one layer, whose gradients are part of what is measured.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from transformers import Qwen2Config, Qwen2ForCausalLM

from tasks.learning.shared import policy
from tasks.learning.shared.batching import micro_batches
from tasks.learning.shared.rows import Row
from tasks.models.attention import ATTENTION, register_attention
from tasks.models.settings import on_cpu
from tasks.models.torch_setup import prepare_torch

VOCABULARY, WIDTH = 151_936, 896
NUM_THREADS = 2


def main() -> None:
    num_positions, size = int(sys.argv[1]), int(sys.argv[2])
    prepare_torch(on_cpu(NUM_THREADS))
    register_attention()
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    config._attn_implementation = ATTENTION
    model = Qwen2ForCausalLM(config)
    ids = [token % VOCABULARY for token in range(1, num_positions + 2)]
    row = Row(ids, [False] + [True] * num_positions, [0.0] * len(ids), 1.0)
    (batch,) = micro_batches([[row]], packing="tree", max_tokens=len(ids), device=model.device)
    if size:
        policy.chunk_size = lambda vocabulary, device: size
    before, start = peak_bytes(), time.perf_counter()
    policy.token_logp(model, batch).sum().backward()
    seconds = time.perf_counter() - start
    print(json.dumps({"bytes": peak_bytes() - before, "seconds": seconds}))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    main()
