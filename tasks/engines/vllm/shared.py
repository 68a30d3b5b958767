"""Arguments of vLLM in process and behind servers; most are for machines without a GPU.

Measured with vLLM 0.32 on CPU: each line prevents a wrong answer, a dead engine or a minute of waiting.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.chat.format import ChatFormat
from tasks.engines.vllm.settings import VLLMSettings, settings_of
from tasks.engines.vllm.weights_folder import WeightsFolder
from tasks.models.files import read_header, weight_files
from tasks.models.folders import model_config
from tasks.models.limits import context_length
from tasks.models.policy_weights import AdapterShape
from tasks.rollouts.settings import EngineSettings, SamplingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM allocates for one of these
MATRIX_OF_A_LAYER = re.compile(r".+\.[0-9]+\..*?([^.]+)\.weight")

SEED_BITS = 63  # a turn's seed has 64 bits, vLLM takes a signed integer of 64

BLOCK_TOKENS = 32  # vLLM's CPU default is 128; only whole blocks are cached, and many prompts are shorter
STEP_TOKENS = 4096
# The compiler would delay the first reply by 15 to 25 s, only to rank log-probs.
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
# vLLM's default on CPU is a second process with bound threads: one more import per start, and it spins for a second
# after its last step on the trainer's cores (2 cores: the probe took 0.9 to 1.7 s, without it 8 to 30 ms). vLLM
# overrules the short name `uni`.
CPU_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

MAX_SOCKET_BYTES = 107  # of the path of a Unix socket: the kernel's own limit
LONGEST_NAME = len("/") + 36  # vLLM names its own sockets by a UUID


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine starts with: the model in `folder`, and with `lora` a policy that is an adapter over it."""

    folder: Path
    chat: ChatFormat
    sampling: SamplingSettings
    settings: EngineSettings
    lora: AdapterShape | None

    @property
    def options(self) -> VLLMSettings:
        return settings_of(self.settings)

    def weights_folder(self) -> WeightsFolder:
        return WeightsFolder(Path(self.options.folder), self.chat.tokenizer, dtype=self.options.dtype)


def private_folder() -> Path:
    """A new folder that no other user can read, short enough for the sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-"))  # 0700, and a name that nobody can foresee
    if len(os.fsencode(folder)) + LONGEST_NAME > MAX_SOCKET_BYTES:
        folder.rmdir()
        raise ValueError(
            f"{folder.parent}: is too long a path for the socket of a vLLM server, which has at most "
            f"{MAX_SOCKET_BYTES} bytes, so no server could be reached. Set TMPDIR to a shorter one, such as /tmp."
        )
    return folder


def private_sockets(folder: Path) -> dict[str, str]:
    """Keep vLLM's sockets in `folder`, and torch's ports, which take no commands, on loopback whatever the host's
    name is.
    """
    return {"VLLM_RPC_BASE_PATH": str(folder)} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


def whole_prompts(max_model_len: int) -> int:
    """Tokens per step (`max_num_batched_tokens`), with chunked prefill off.

    A prompt split over two steps takes its first sample back from the request's seeded generator, which a CPU generator
    cannot do: the engine dies ("does not use offset") as soon as a step is full.
    """
    return max(STEP_TOKENS, max_model_len)


def max_model_len(model_folder: Path, sampling: SamplingSettings) -> int:
    """One token more than an episode may have, if the context allows: `token_logp` makes vLLM write one."""
    wanted = sampling.max_tokens_per_episode + 1
    return min(wanted, context_length(model_config(model_folder)) or wanted)


def vocabulary_size(model_folder: Path, tokenizer: PreTrainedTokenizerBase) -> int:
    """The ids the model can read and write: the tokenizer's, and those that pad the embedding."""
    config = model_config(model_folder)
    return max(len(tokenizer), config.get("text_config", config).get("vocab_size") or 0)


def lora_arguments(lora: AdapterShape | None, folder: Path) -> dict[str, Any]:
    """What vLLM must be started with to take a `lora` adapter over the weights in `folder`: room for one.

    The output head is named by no adapter of ours and must not be by default: with a head made for adapters vLLM
    computes prompt log-probs of two requests by the mapping of one, and dies.
    """
    if lora is None:
        return {}
    fitting = [most for most in MAX_LORA_RANKS if most >= lora.rank]
    if not fitting:
        raise ValueError(
            f"train.lora.rank is {lora.rank} and vLLM takes adapters of rank {MAX_LORA_RANKS[-1]} at most, so it could "
            f"not generate with the policy. Lower the rank, or set engine.name: transformers."
        )
    targets = lora.target_modules if isinstance(lora.target_modules, list) else matrices_of_layers(folder)
    return {
        "enable_lora": True,
        "max_lora_rank": fitting[0],
        "max_loras": 1,
        "max_cpu_loras": 1,
        "lora_target_modules": targets,
    }


def matrices_of_layers(folder: Path) -> list[str]:
    """The last names of the modules inside layers that have a matrix, such as q_proj."""
    headers = [read_header(file) for file in weight_files(folder, is_adapter=False)]
    names = [name for header in headers for name, _, shape in header if len(shape) == 2]
    return sorted({found[1] for name in names if (found := MATRIX_OF_A_LAYER.fullmatch(name))})


def cpu_executor(tensor_parallel_size: int) -> str:
    return CPU_EXECUTOR if tensor_parallel_size == 1 else "mp"


def seed_for_vllm(seed: int) -> int:
    return seed % (1 << SEED_BITS)
