"""Memory of a training run on its device, by part, in the three phases of an iteration.

Weights and what mirrors them follow from the settings exactly. Activations are a count of vectors per position, fitted
to peaks of one to eight layers of Qwen2.5-0.5B's width over packed groups of 2,300 and 3,700 positions on a CPU (2
cores of an AMD EPYC, torch 2.13). On a GPU nothing of it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tasks.planning.hardware import GIB
from tasks.planning.setup import Setup, num_bytes

FLOAT = 4
# Python with torch and transformers, before any weights; on a GPU the CUDA context and the libraries' workspaces.
PROCESS_BYTES, CUDA_BYTES = 700 << 20, 1500 << 20
# Vectors of the hidden size and of the MLP's inner size, per position: what a layer keeps for backward, and what
# forward and backward of one layer need besides.
KEPT_HIDDEN, KEPT_INNER = 12, 3.6
WORK_HIDDEN, WORK_INNER = 4, 3
HALF_SHARE = 0.65  # of float32's activations, in bfloat16: norms and rotary embeddings compute in float32
# By whether the device is a GPU; tests compare both with the modules that set them, whose import takes seconds.
LOGIT_BYTES = {False: 64 << 20, True: 512 << 20}  # of a chunk of the output head
FORWARD_BYTES = {False: 512 << 20, True: 2 << 30}  # of one in the in-process engine
LOGITS_COPIES = 5  # of a chunk in backward
ENGINE_WORKSPACE = 2 << 30  # of vLLM on a GPU: activations and CUDA graphs; an assumption


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes on the device while episodes are played, weights are updated and a checkpoint is copied; `host` is pinned
    memory beside a GPU's.
    """

    name: str
    rollout: float
    update: float
    save: float
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    parts: tuple[Part, ...]

    @property
    def phases(self) -> dict[str, float]:
        return {
            "playing": sum(part.rollout for part in self.parts),
            "updating": sum(part.update for part in self.parts),
            "saving": sum(part.save for part in self.parts),
        }

    @property
    def peak(self) -> float:
        return max(self.phases.values())

    @property
    def host(self) -> float:
        return sum(part.host for part in self.parts)


def always(name: str, size: float) -> Part:
    return Part(name, size, size, size)


def plan_memory(setup: Setup) -> Memory:
    parts = (
        _process(setup),
        *_weights(setup),
        _optimizer_state(setup),
        _reference(setup),
        Part("gradients", 0, FLOAT * trained_parameters(setup), 0),
        _activations(setup),
        _logits(setup),
        *_engine(setup),
        _checkpoint(setup),
    )
    return Memory(tuple(part for part in parts if part.rollout or part.update or part.save or part.host))


def warm_start_bytes(setup: Setup) -> float | None:
    """What a supervised warm start takes, where that is not what training takes: it trains all weights under LoRA too,
    and has no reference. None without LoRA.
    """
    if setup.settings.train.lora is None:
        return None
    settings = setup.settings.changed("train.lora", None).changed("train.kl_weight", 0.0)
    return plan_memory(replace(setup, settings=settings)).phases["updating"]


def trained_parameters(setup: Setup) -> int:
    lora = setup.settings.train.lora
    return setup.shape.adapter_parameters(lora) if lora else setup.shape.num_parameters


def _process(setup: Setup) -> Part:
    return always("process", CUDA_BYTES if setup.machine.is_gpu else PROCESS_BYTES)


def _weights(setup: Setup) -> Iterator[Part]:
    """Under LoRA the base is frozen and the adapter is trained, in float32."""
    compute, lora = setup.settings.compute, setup.settings.train.lora
    yield always("weights", setup.shape.num_parameters * num_bytes(compute.frozen if lora else compute.weights))
    if lora:
        yield always("adapter", FLOAT * setup.shape.adapter_parameters(lora))


def _optimizer_state(setup: Setup) -> Part:
    """AdamW's two averages, or Muon's one of the matrices inside the layers; masters where weights are bfloat16."""
    size = optimizer_bytes(setup)
    if setup.machine.is_gpu and setup.settings.compute.offload == "optimizer":
        return Part("optimizer", 0, size, 0, host=size)
    return always("optimizer", size)


def optimizer_bytes(setup: Setup) -> float:
    settings, count = setup.settings, trained_parameters(setup)
    averages = 2 * count
    if settings.train.optimizer == "muon":
        averages -= count if settings.train.lora else setup.shape.matrix_parameters
    has_masters = settings.compute.weights == "bfloat16" and not settings.train.lora
    return FLOAT * (averages + count * has_masters)


def _reference(setup: Setup) -> Part:
    settings = setup.settings
    size = FLOAT if settings.train.lora else num_bytes(settings.compute.frozen)
    return always("reference", trained_parameters(setup) * size if settings.train.kl_weight else 0)


def _activations(setup: Setup) -> Part:
    """Kept for backward: of every layer, or with checkpointing its input, and of one layer all.

    On a CPU as much as a vector of the inner size stays beside each input: blocks that are freed between inputs are
    too small for the next layer's.
    """
    settings, shape = setup.settings, setup.shape
    positions = max(settings.train.micro_batch_tokens, settings.sampling.max_tokens_per_episode)
    a_layer = KEPT_HIDDEN * shape.hidden + KEPT_INNER * shape.inner
    work = WORK_HIDDEN * shape.hidden + WORK_INNER * shape.inner
    kept = a_layer * shape.num_layers
    if settings.train.gradient_checkpointing:
        kept = (shape.hidden + (0 if setup.machine.is_gpu else shape.inner)) * shape.num_layers + a_layer
    scale = FLOAT * (HALF_SHARE if computes_in_half(setup) else 1)
    playing = min(FORWARD_BYTES[setup.machine.is_gpu], scale * setup.at_once * positions * work)
    return Part("activations", 0 if setup.is_vllm else playing, scale * positions * (kept + work), 0)


def computes_in_half(setup: Setup) -> bool:
    settings = setup.settings
    dtype = settings.compute.frozen if settings.train.lora else settings.compute.weights
    return dtype == "bfloat16" or settings.train.autocast == "bfloat16"


def _logits(setup: Setup) -> Part:
    """A chunk with its gradients, and where the output matrix is trained its float32 gradient, which waits for that of
    the embeddings.
    """
    settings, shape = setup.settings, setup.shape
    chunk = min(LOGIT_BYTES[setup.machine.is_gpu], FLOAT * settings.train.micro_batch_tokens * shape.vocabulary)
    matrix = 0 if settings.train.lora else FLOAT * shape.head_parameters
    playing = 0 if setup.is_vllm else FLOAT * 2 * setup.at_once * shape.vocabulary
    return Part("logits", playing, LOGITS_COPIES * chunk + matrix, 0)


def _engine(setup: Setup) -> Iterator[Part]:
    """Keys and values; vLLM's own weights beside the trainer's. All of it is given back before an update; under LoRA
    vLLM keeps its base in host memory while it sleeps, since it is never sent again.
    """
    if not setup.shares_the_device:
        return
    if setup.is_vllm:
        size = setup.shape.num_parameters * _engine_size(setup)
        is_kept = setup.settings.train.lora is not None and setup.machine.is_gpu
        yield Part("engine's weights", size, 0, 0, host=size if is_kept else 0)
        yield Part("engine's workspace", ENGINE_WORKSPACE if setup.machine.is_gpu else 0, 0, 0)
    yield Part("keys and values", cached_tokens(setup) * _token_bytes(setup), 0, 0)


def cached_tokens(setup: Setup) -> float:
    """Of the keys and values the engine has room for; at least one episode's, without which nothing is played.

    vLLM fills its share of a GPU's memory with them. The in-process engine has as many as the episodes at once need,
    or `engine.settings.kv_cache_gib`.
    """
    longest, own = setup.settings.sampling.max_tokens_per_episode, setup.settings.engine.own
    wanted = float((setup.at_once + 1) * longest)  # one takes padding
    if setup.is_vllm and setup.machine.is_gpu:
        rest = getattr(own, "gpu_memory_utilization", 0.9) * setup.machine.memory - ENGINE_WORKSPACE
        return max(longest, (rest - setup.shape.num_parameters * _engine_size(setup)) / _token_bytes(setup))
    bound = getattr(own, "kv_cache_gib", None)
    return wanted if bound is None else max(longest, min(wanted, bound * GIB / _token_bytes(setup)))


def _token_bytes(setup: Setup) -> float:
    return setup.shape.key_value_elements * _engine_size(setup)


def _engine_size(setup: Setup) -> int:
    """Bytes of one number in the engine."""
    compute, lora = setup.settings.compute, setup.settings.train.lora
    return num_bytes(getattr(setup.settings.engine.own, "dtype", compute.frozen if lora else compute.weights))


def _checkpoint(setup: Setup) -> Part:
    """A copy of all that is trained, which a thread writes while the next episodes are played: on a CPU beside the
    rest, for a GPU in pinned memory.
    """
    settings, lora = setup.settings, setup.settings.train.lora
    trained = num_bytes("float32" if lora else settings.compute.weights) * trained_parameters(setup)
    size = trained + optimizer_bytes(setup) + _reference(setup).save
    return Part("checkpoint", 0, 0, 0, host=size) if setup.machine.is_gpu else Part("checkpoint", size, 0, size)
