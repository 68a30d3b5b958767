"""Memory of a training run on its device, by part, in the two phases of an iteration.

Weights and what mirrors them follow from the settings exactly. Activations are a count of what the layers keep for
backward, in vectors per position. On a GPU nothing of it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.planning.setup import Setup, num_bytes

FLOAT = 4
# Python with torch and transformers, before any weights; on a GPU the CUDA context and the libraries' workspaces.
PROCESS_BYTES, CUDA_BYTES = 700 << 20, 1500 << 20
# What a layer keeps of a position for backward: vectors of the hidden size and of the MLP's inner size.
HIDDEN_VECTORS, INNER_VECTORS = 12, 4
LOGITS_COPIES = 3  # logits, their exponentials and a gradient
LOGITS_AT_ONCE = 1 << 24  # elements
ENGINE_WORKSPACE = 2 << 30  # of vLLM on a GPU: activations and CUDA graphs; an assumption
PREFILL_TOKENS = 8192  # of one forward of prompts; an assumption


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes on the device while episodes are played and while weights are updated; `host` is pinned memory."""

    name: str
    rollout: float
    update: float
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    parts: tuple[Part, ...]

    @property
    def rollout(self) -> float:
        return sum(part.rollout for part in self.parts)

    @property
    def update(self) -> float:
        return sum(part.update for part in self.parts)

    @property
    def peak(self) -> float:
        return max(self.rollout, self.update)

    @property
    def host(self) -> float:
        return sum(part.host for part in self.parts)


def plan_memory(setup: Setup) -> Memory:
    parts = (
        _process(setup),
        *_weights(setup),
        _gradients(setup),
        _optimizer_state(setup),
        _reference(setup),
        _activations(setup),
        _logits(setup),
        *_engine(setup),
    )
    return Memory(tuple(part for part in parts if part.rollout or part.update or part.host))


def _process(setup: Setup) -> Part:
    fixed = CUDA_BYTES if setup.machine.is_gpu else PROCESS_BYTES
    return Part("process", fixed, fixed)


def _weights(setup: Setup) -> Iterator[Part]:
    """Under LoRA the base is frozen and the adapter is trained."""
    compute, lora = setup.settings.compute, setup.settings.train.lora
    count = setup.shape.num_parameters
    size = count * num_bytes(compute.frozen if lora else compute.weights)
    yield Part("weights", size, size)
    if lora:
        adapter = FLOAT * setup.shape.adapter_parameters(lora)
        yield Part("adapter", adapter, adapter)


def trained_parameters(setup: Setup) -> int:
    lora = setup.settings.train.lora
    return setup.shape.adapter_parameters(lora) if lora else setup.shape.num_parameters


def _gradients(setup: Setup) -> Part:
    size = FLOAT if setup.settings.train.lora else num_bytes(setup.settings.compute.weights)
    return Part("gradients", 0, trained_parameters(setup) * size)


def _optimizer_state(setup: Setup) -> Part:
    """AdamW's two averages, or Muon's one of the matrices inside the layers; masters where weights are bfloat16."""
    settings, count = setup.settings, trained_parameters(setup)
    averages = 2 * count
    if settings.train.optimizer == "muon":
        averages -= count if settings.train.lora else setup.shape.matrix_parameters
    has_masters = settings.compute.weights == "bfloat16" and not settings.train.lora
    size = FLOAT * (averages + count * has_masters)
    if settings.compute.offload == "optimizer":
        return Part("optimizer", 0, size, host=size)
    return Part("optimizer", size, size)


def _reference(setup: Setup) -> Part:
    settings = setup.settings
    if not settings.train.kl_weight:
        return Part("reference", 0, 0)
    size = FLOAT if settings.train.lora else num_bytes(settings.compute.frozen)
    return Part("reference", *[trained_parameters(setup) * size] * 2)


def _activations(setup: Setup) -> Part:
    """Kept for backward: of every layer, or with checkpointing its input, and of one layer all."""
    settings, shape = setup.settings, setup.shape
    positions = max(settings.train.micro_batch_tokens, settings.sampling.max_tokens_per_episode)
    is_half = settings.compute.weights == "bfloat16" or settings.train.autocast == "bfloat16"
    size = 2 if is_half else FLOAT
    a_layer = HIDDEN_VECTORS * shape.hidden + INNER_VECTORS * shape.inner
    kept = shape.hidden * shape.num_layers + a_layer
    if not settings.train.gradient_checkpointing:
        kept = a_layer * shape.num_layers
    playing = min(positions, PREFILL_TOKENS) * (2 * shape.hidden + 2 * shape.inner) * size
    return Part("activations", 0 if setup.is_vllm else playing, positions * kept * size)


def _logits(setup: Setup) -> Part:
    sampled = min(LOGITS_AT_ONCE, setup.settings.train.micro_batch_tokens * setup.shape.vocabulary)
    playing = 0 if setup.is_vllm else FLOAT * 2 * setup.at_once * setup.shape.vocabulary
    return Part("logits", playing, LOGITS_COPIES * FLOAT * sampled)


def _engine(setup: Setup) -> Iterator[Part]:
    """Keys and values of all live episodes; vLLM's own weights beside the trainer's, given back before an update."""
    if not setup.shares_the_device:
        return
    own = setup.settings.engine.own
    dtype = getattr(own, "dtype", setup.settings.compute.weights)
    if setup.is_vllm:
        yield Part("engine's weights", setup.shape.num_parameters * num_bytes(dtype), 0)
        yield Part("engine's workspace", ENGINE_WORKSPACE if setup.machine.is_gpu else 0, 0)
    tokens = setup.at_once * setup.settings.sampling.max_tokens_per_episode
    yield Part("keys and values", tokens * setup.shape.key_value_elements * num_bytes(dtype), 0)
