"""What a run would need: memory, disk and time, from the settings, the model's size and the lengths of references.

Every estimate is rough: it separates hours from days, and megabytes from terabytes. Weights are float32 and everything
runs on the CPU, as `models.load_model` loads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import NotCheckable, Skipped

FLOAT = 4  # bytes
KEPT_CHECKPOINTS = 3  # two are kept, a third is being written
COPIES = 2  # of what DVC tracks: in artifacts/ and in its cache
TRAJECTORY_BYTES = 20  # per token, as stored; 5.6 KB were measured for 300 tokens
PROCESS_BYTES = 700 << 20  # Python with torch and transformers, before any weights
LOGITS_AT_ONCE = 3 << 26  # bytes: logits, their exponentials and a gradient in learning/shared/policy.py
# Measured on the demo (2 cores): what a step of the engine costs per layer, and a token beside its arithmetic.
LAYER_SECONDS, TOKEN_SECONDS = 0.0004, 20e-6
START_SECONDS = 5  # a stage's imports and loading
OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
}


def memory_needed(context: DoctorContext) -> float:
    """Bytes at the peak of training: weights and what mirrors them, the engine's cache, one micro-batch.

    Full fine-tuning: gradients, AdamW's two averages (Muon: at most one), and a frozen reference where KL needs it.
    LoRA: few weights, and a second copy for the engine.
    """
    train, shape = context.settings.train, context.model.config
    mirrors = 1 + (1 if train.lora else 3 + (train.kl_weight > 0))
    hidden = size(context, "hidden_size")
    inner = shape.get("intermediate_size") or 4 * hidden
    cache = context.settings.engine.max_concurrent_episodes * context.settings.sampling.max_tokens_per_episode
    # Backward needs about twelve vectors of the hidden size and four of the MLP's, per layer and position.
    a_layer = hidden if train.gradient_checkpointing else 12 * hidden + 4 * inner
    positions = max(train.micro_batch_tokens, context.settings.sampling.max_tokens_per_episode)
    logits = min(LOGITS_AT_ONCE, 3 * FLOAT * positions * size(context, "vocab_size"))
    activations = FLOAT * positions * size(context, "num_hidden_layers") * a_layer
    return PROCESS_BYTES + weights_bytes(context) * mirrors + cache * key_value_bytes(context) + activations + logits


def disk_needed(context: DoctorContext) -> float:
    """Bytes of snapshots, of the current checkpoints, and of the trajectories of assess, evaluate and promote."""
    train, weights = context.settings.train, weights_bytes(context)
    state = 3 + (train.kl_weight > 0)  # policy, AdamW's two averages, reference
    a_trajectory = context.settings.sampling.max_tokens_per_episode * TRAJECTORY_BYTES
    if train.lora:
        weights = 0.1 * weights  # an adapter is smaller than that
    assess = context.settings.assess
    episodes = sum(math.prod(pair) for pair in evaluated(context)) + assess.num_problems * assess.samples_per_problem
    kept = COPIES * (num_snapshots(context) * weights + episodes * a_trajectory)
    return kept + KEPT_CHECKPOINTS * state * weights + weights_bytes(context)  # the last is the registry's


def train_seconds(context: DoctorContext, rate: float) -> float:
    """Rollouts of all iterations, the reference's forward, forward and backward (three forwards) per pass, and the
    forward that notes the old log-probs of all groups but the first step's.
    """
    train, lengths = context.settings.train, _lengths(context)
    prompts = train.problems_per_iteration * (1 if train.packing == "tree" else train.group_size)
    episodes = train.problems_per_iteration * train.group_size
    tokens = prompts * lengths.prompt + episodes * lengths.rest
    forwards = 3 * train.updates_per_batch + (train.kl_weight > 0) + 1 - 1 / train.steps_per_batch
    micro_batches = math.ceil(tokens / train.micro_batch_tokens)
    update = forwards * (tokens * operations(context) / rate + micro_batches * step_seconds(context))
    return START_SECONDS + train.num_iterations * (rollout_seconds(context, episodes, rate) + update)


def evaluate_seconds(context: DoctorContext, rate: float) -> float:
    return START_SECONDS + sum(
        models * rollout_seconds(context, episodes, rate) for models, episodes in evaluated(context)
    )


def rollout_seconds(context: DoctorContext, episodes: int, rate: float) -> float:
    """The arithmetic of every token, and per token after the prompt the bookkeeping and a step of the engine, shared by
    the episodes that fit at once.
    """
    lengths = _lengths(context)
    rounds = max(lengths.longest_rest, lengths.rest * episodes / context.settings.engine.max_concurrent_episodes)
    arithmetic = episodes * (lengths.prompt + lengths.rest) * operations(context) / rate
    return arithmetic + episodes * lengths.rest * TOKEN_SECONDS + rounds * step_seconds(context)


def operations(context: DoctorContext) -> float:
    return 2.0 * context.model.num_parameters


def step_seconds(context: DoctorContext) -> float:
    return size(context, "num_hidden_layers") * LAYER_SECONDS


def evaluated(context: DoctorContext) -> list[tuple[int, int]]:
    """(models, episodes of each): every snapshot on select; base, warm start and best on test."""
    options, problems = context.settings.evaluate, context.problems
    on_select = len(problems["select"]) * options.select_samples_per_problem
    return [(num_snapshots(context), on_select), (3, len(problems["test"]) * options.test_samples_per_problem)]


def num_snapshots(context: DoctorContext) -> int:
    return math.ceil(context.settings.train.num_iterations / context.settings.train.snapshot_interval)


def weights_bytes(context: DoctorContext) -> float:
    return FLOAT * context.model.num_parameters


def key_value_bytes(context: DoctorContext) -> float:
    config, heads = context.model.config, size(context, "num_attention_heads")
    head_size = config.get("head_dim") or size(context, "hidden_size") // heads
    return 2 * FLOAT * size(context, "num_hidden_layers") * (config.get("num_key_value_heads") or heads) * head_size


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Tokens of the references: prompt and what follows it, on average, and the longest that follows."""

    prompt: float
    rest: float
    longest_rest: int


def _lengths(context: DoctorContext) -> _Lengths:
    try:
        masks = [reference.trajectory.sampled_mask for reference in context.references]
    except Skipped:
        budget = context.settings.sampling.max_tokens_per_episode
        return _Lengths(0, budget, budget)
    prompts = [mask.index(True) for mask in masks]
    rests = [len(mask) - prompt for mask, prompt in zip(masks, prompts, strict=True)]
    return _Lengths(sum(prompts) / len(masks), sum(rests) / len(masks), max(rests))


def size(context: DoctorContext, name: str) -> int:
    config = context.model.config
    found = next((config[key] for key in (name, *OTHER_NAMES.get(name, ())) if config.get(key)), None)
    if found is None:
        remedy = "Watch memory and time of the first iterations; nothing here can estimate them."
        raise NotCheckable(f"the model's config.json contains no {name}, which this estimate needs", remedy)
    return int(found)
