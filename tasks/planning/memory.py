"""Memory of a run on its device, by part, in the three phases of an iteration and where a model is measured.

Weights and what mirrors them follow from the settings exactly. Activations are a count of vectors per position, fitted
to peaks of one to eight layers of Qwen2.5-0.5B's width over packed groups of 2,300 and 3,700 positions on a CPU (2
cores of an AMD EPYC, torch 2.13); infra/benchmarks.md has the whole model's. On a GPU nothing of it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tasks.core.machine import GIB
from tasks.planning.cut import of_rank_0
from tasks.planning.parts import Memory, Part
from tasks.planning.setup import Setup, evaluation_setups, num_bytes, warm_start_setup

FLOAT = 4
PROCESS, CHECKPOINT, OPTIMIZER = "process", "checkpoint", "optimizer"
OF_TRAINER = (OPTIMIZER, CHECKPOINT)  # of what is there while episodes are played
# Python with torch and transformers, before any weights; on a GPU the CUDA context and the libraries' workspaces.
PROCESS_BYTES, CUDA_BYTES = 700 << 20, 1500 << 20
# Vectors of the hidden size and of the MLP's inner size, per position: what a layer keeps for backward, and what
# forward and backward of one layer need besides.
KEPT_HIDDEN, KEPT_INNER = 12, 3.6
WORK_HIDDEN, WORK_INNER = 4, 3
FED_HIDDEN, FED_INNER = 8, 3  # of a forward in the in-process engine
HALF_SHARE = 0.65  # of float32's activations, in bfloat16: norms and rotary embeddings compute in float32
HEAP_BYTES = 512 << 20  # of blocks on a CPU that are free and not yet given back (models/torch_setup.py)
# By whether the device is a GPU; tests compare both with the modules that set them, whose import takes seconds.
LOGIT_BYTES = {False: 64 << 20, True: 512 << 20}  # of a chunk of the output head
FORWARD_BYTES = {False: 512 << 20, True: 2 << 30}  # of one in the in-process engine
LOGITS_COPIES = 5  # of a chunk in backward
SHARE = "engine.settings.gpu_memory_utilization"
ENGINE_WORKSPACE = 2 << 30  # of vLLM on a GPU: activations and CUDA graphs; an assumption


def always(name: str, size: float) -> Part:
    return Part(name, size, size, size)


def plan_memory(setup: Setup) -> Memory:
    """Of several trainers that of rank 0, which has the most; of plays beside training the largest."""
    parts, evaluating = _parts(setup), max(map(_alone, evaluation_setups(setup)), key=_total, default={})
    if setup.settings.launch.num_trainers > 1:
        parts = of_rank_0(parts, setup, trained=trained_parameters(setup))
    parts = [replace(part, evaluate=evaluating.get(part.name, 0.0)) for part in parts]
    used = ("rollout", "update", "save", "evaluate", "host")
    return Memory(tuple(part for part in parts if any(getattr(part, name) for name in used)))


def _alone(evaluation: Setup) -> dict[str, float]:
    """Of a model that is played without a trainer."""
    return {part.name: part.rollout for part in _parts(evaluation) if part.name not in OF_TRAINER}


def _total(sizes: Mapping[str, float]) -> float:
    return sum(sizes.values())


def _parts(setup: Setup) -> Sequence[Part]:
    """Of one trainer."""
    return (
        _process(setup),
        always("free blocks", 0 if setup.machine.is_gpu else HEAP_BYTES),
        *_weights(setup),
        _optimizer_state(setup),
        _reference(setup),
        Part("gradients", 0, FLOAT * trained_parameters(setup), 0),
        *_activations(setup),
        *_engine(setup),
        _checkpoint(setup),
    )


def warm_start_memory(setup: Setup) -> Memory:
    """What a supervised warm start takes: its next step while a checkpoint is written. It plays when that is over."""
    parts = plan_memory(warm_start_setup(setup)).parts
    updating = [Part(part.name, 0, part.save if part.name == CHECKPOINT else part.update, 0) for part in parts]
    return Memory(tuple(part for part in updating if part.update))


def loaded_bytes(setup: Setup) -> float:
    """Of several trainers before each keeps its part: all have the whole model, and a reference that is no adapter.
    Rank 0 has the policy once more. On a GPU those of its own; on processors, of all that share their memory.
    """
    whole, launch = setup.base_bytes, setup.settings.launch
    reference = 0.0 if setup.settings.train.lora else _reference(setup).update
    together = launch.num_trainers if launch.launcher == "torchrun" and not setup.machine.is_gpu else 1
    has_copy = (setup.shares_the_device and not setup.is_vllm) or not setup.machine.is_gpu
    return together * (whole + reference) + whole * has_copy


def trained_parameters(setup: Setup) -> int:
    lora = setup.settings.train.lora
    return setup.shape.adapter_parameters(lora) if lora else setup.shape.num_parameters


def _process(setup: Setup) -> Part:
    return always(PROCESS, CUDA_BYTES if setup.machine.is_gpu else PROCESS_BYTES)


def _weights(setup: Setup) -> Iterator[Part]:
    """Under LoRA the base is frozen and the adapter is trained. An engine that plays ahead has a copy of what is
    trained; what waits for it is in host memory.
    """
    lora = setup.settings.train.lora
    yield always("weights", setup.base_bytes)
    if lora:
        yield always("adapter", trained_bytes(setup))
    if setup.is_ahead:
        is_served = lora is not None or not setup.is_vllm
        on_host = trained_bytes(setup)
        size = trained_bytes(setup) * is_served + (0 if setup.machine.is_gpu else on_host)
        yield Part("copies to play with", size, size, size, host=on_host if setup.machine.is_gpu else 0)


def trained_bytes(setup: Setup) -> float:
    """Of the weights that are trained: all of them, or the adapter."""
    return trained_parameters(setup) * num_bytes(setup.settings.compute.weights)


def _optimizer_state(setup: Setup) -> Part:
    """AdamW's two averages, or Muon's one of the matrices inside the layers; masters where weights are bfloat16."""
    size = optimizer_bytes(setup)
    if setup.machine.is_gpu and setup.settings.compute.offload == "optimizer":
        return Part(OPTIMIZER, 0, size, 0, host=size)
    return always(OPTIMIZER, size)


def optimizer_bytes(setup: Setup) -> float:
    settings, count = setup.settings, trained_parameters(setup)
    averages = 2 * count
    if settings.train.optimizer == "muon":
        averages -= count if settings.train.lora else setup.shape.linear_parameters
    has_masters = settings.compute.weights == "bfloat16"
    return FLOAT * (averages + count * has_masters)


def _reference(setup: Setup) -> Part:
    compute, train = setup.settings.compute, setup.settings.train
    size = num_bytes(compute.weights if train.lora else compute.frozen)
    return always("reference", trained_parameters(setup) * size if train.kl_weight else 0)


def _activations(setup: Setup) -> Iterator[Part]:
    """Kept for backward: of every layer, or with checkpointing its input, and of one layer all; beside it what one
    layer computes with. The head's chunks come before the layers' backward, when with checkpointing none is kept whole.
    """
    settings, shape = setup.settings, setup.shape
    positions = max(settings.train.micro_batch_tokens, settings.sampling.max_tokens_per_episode)
    a_layer = KEPT_HIDDEN * shape.hidden + KEPT_INNER * shape.inner
    work = WORK_HIDDEN * shape.hidden + WORK_INNER * shape.inner
    is_recomputed = settings.train.gradient_checkpointing
    kept = (shape.hidden if is_recomputed else a_layer) * shape.num_layers
    scale = FLOAT * (HALF_SHARE if computes_in_half(setup) else 1)
    layer = scale * positions * (work + a_layer * is_recomputed)
    chunk = min(LOGIT_BYTES[setup.machine.is_gpu], FLOAT * settings.train.micro_batch_tokens * shape.vocabulary)
    logits = LOGITS_COPIES * chunk
    yield _played(setup, "activations", _fed_bytes(setup), scale * positions * kept + layer)
    yield _played(
        setup, "logits", 0 if setup.is_vllm else FLOAT * 2 * setup.at_once * shape.vocabulary, max(0.0, logits - layer)
    )
    if not settings.train.lora:
        yield Part("the head's gradient", 0, FLOAT * shape.head_parameters, 0)


def _fed_bytes(setup: Setup) -> float:
    """Of the in-process engine's largest forward: the prompts of all groups at once, as far as it may take them."""
    if setup.is_vllm:
        return 0.0
    shape, settings = setup.shape, setup.settings
    a_token = (FED_HIDDEN * shape.hidden + FED_INNER * shape.inner) * setup.size_in_engine + 2 * _token_bytes(setup)
    groups = math.ceil(setup.at_once / settings.train.group_size)
    return min(FORWARD_BYTES[setup.machine.is_gpu], groups * settings.sampling.max_tokens_per_episode * a_token)


def _played(setup: Setup, name: str, playing: float, updating: float = 0.0, *, host: float = 0.0) -> Part:
    """What episodes need while they are played: during an update and a save too where the engine plays ahead."""
    ahead = playing if setup.is_ahead else 0.0
    return Part(name, playing, updating + ahead, ahead, host)


def computes_in_half(setup: Setup) -> bool:
    return "bfloat16" in (setup.base_dtype, setup.settings.train.autocast)


def _engine(setup: Setup) -> Iterator[Part]:
    """Keys and values; vLLM's own weights beside the trainer's. All of it is given back before an update, unless the
    engine plays ahead; under LoRA vLLM keeps its base in host memory while it sleeps, since it is never sent again. Of
    vLLM over several GPUs the first one's part.
    """
    if not setup.shares_the_device:
        return
    if setup.is_vllm:
        size = setup.shape.num_parameters * setup.size_in_engine
        is_kept = setup.settings.train.lora is not None and setup.machine.is_gpu and not setup.is_ahead
        part = size / setup.settings.gpus_per_engine
        yield _played(setup, "engine's weights", part, host=size if is_kept else 0.0)
        yield _played(setup, "engine's workspace", ENGINE_WORKSPACE if setup.machine.is_gpu else 0)
    yield _played(setup, "keys and values", cached_tokens(setup) * _token_bytes(setup))


def cached_tokens(setup: Setup) -> float:
    """Of the keys and values the engine has room for; at least one episode's, without which nothing is played.

    vLLM fills its share of a GPU's memory with them. The in-process engine has as many as the episodes at once need,
    or `engine.settings.kv_cache_gib`.
    """
    longest, own = setup.settings.sampling.max_tokens_per_episode, setup.settings.engine.own
    wanted = float((_num_slots(setup) + 1) * longest)  # one takes padding
    if setup.is_vllm and setup.machine.is_gpu:
        return max(longest, (_engine_share(setup) * setup.machine.memory - _engine_base(setup)) / _token_bytes(setup))
    bound = getattr(own, "kv_cache_gib", None)
    return wanted if bound is None else max(longest, min(wanted, bound * GIB / _token_bytes(setup)))


def _num_slots(setup: Setup) -> int:
    """The in-process engine doubles them as episodes begin, up to all that it may have at once."""
    return min(1 << (setup.at_once - 1).bit_length(), setup.settings.engine.max_concurrent_episodes)


def share_fault(setup: Setup) -> str | None:
    """Why vLLM would not start, where its share of a GPU's memory is too small; None where it is not. It starts anew
    for a play beside training whose episodes have another length.
    """
    if not (setup.is_vllm and setup.shares_the_device and setup.machine.is_gpu):
        return None
    least, name = _largest_share(setup)
    if least <= _engine_share(setup):
        return None
    episode = f"one episode of {name}" if name else "one episode"
    return (
        f"{SHARE} is {_engine_share(setup):g}; vLLM's weights, workspace and {episode} take {_in_hundredths(least):g} "
        f"of {setup.machine.name}, so it would not start"
    )


def enough_share(setup: Setup) -> float:
    """Of a GPU's memory for vLLM to start, in hundredths."""
    least, _ = _largest_share(setup)
    return _in_hundredths(least)


def _in_hundredths(share: float) -> float:
    return math.ceil(100 * share) / 100


def _largest_share(setup: Setup) -> tuple[float, str]:
    """Of those that training and each play beside it need, with the play's name; without one where it is training's."""
    beside = zip(evaluation_setups(setup), setup.plays, strict=True)
    shares = [(_least_share(setup), ""), *((_least_share(one), play.name) for one, play in beside)]
    return max(shares, key=lambda item: item[0])


def _least_share(setup: Setup) -> float:
    episode = setup.settings.sampling.max_tokens_per_episode * _token_bytes(setup)
    return (_engine_base(setup) + episode) / setup.machine.memory


def _engine_share(setup: Setup) -> float:
    return float(getattr(setup.settings.engine.own, "gpu_memory_utilization", 0.9))


def _engine_base(setup: Setup) -> float:
    return ENGINE_WORKSPACE + setup.shape.num_parameters * setup.size_in_engine / setup.settings.gpus_per_engine


def _token_bytes(setup: Setup) -> float:
    """On each of an engine's GPUs, which share out the heads; every one has at least one of them."""
    parts = min(setup.settings.gpus_per_engine, setup.shape.num_key_value_heads)
    return setup.shape.key_value_elements * setup.size_in_engine / parts


def checkpoint_bytes(setup: Setup) -> float:
    """What is trained, the optimizer's state and the reference."""
    return trained_bytes(setup) + optimizer_bytes(setup) + _reference(setup).save


def snapshot_bytes(setup: Setup) -> float:
    """The model in the dtype it was stored in, or the adapter alone."""
    return trained_bytes(setup) if setup.settings.train.lora else model_bytes(setup)


def model_bytes(setup: Setup) -> float:
    """Of a whole model's files."""
    return setup.shape.num_parameters * num_bytes(setup.shape.stored)


def _checkpoint(setup: Setup) -> Part:
    """A copy of all that is trained, which a thread writes while the next episodes are played, and beside the next
    update where the engine plays ahead: on a CPU in the same memory, for a GPU in pinned memory. A disk so slow that
    the write outlasts the episodes is not counted.
    """
    size = checkpoint_bytes(setup)
    if setup.machine.is_gpu:
        return Part(CHECKPOINT, 0, 0, 0, host=size)
    return Part(CHECKPOINT, size, size if setup.is_ahead else 0, size)
