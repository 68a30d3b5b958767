"""What vLLM needs to be told on a machine without a GPU, in this process or behind servers.

Measured with vLLM 0.32: each line here was a wrong answer, a dead engine or a minute of waiting.
"""

from __future__ import annotations

BLOCK_TOKENS = 32  # vLLM's own choice on CPU is 128, longer than many a prompt, and only whole blocks are cached
STEP_TOKENS = 4096
# A compiler that only ranks log-probs would hold up the first reply for 15 to 25 s.
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}


def whole_prompts(max_model_len: int) -> int:
    """The tokens of a step (`max_num_batched_tokens`), to go with chunked prefill switched off.

    A prompt read in two goes has its first, unwanted sample taken back from the request's own seeded generator, which a
    CPU generator cannot do: the engine dies ("does not use offset") as soon as a step is full.
    """
    return max(STEP_TOKENS, max_model_len)
