"""Checks of the machine: threads, memory, disk and time, estimated from the settings and the size of the model.

Every estimate is rough, good for telling hours from days and megabytes from terabytes; what it rests on stands beside
its formula. Weights are float32 and everything runs on the CPU, as `models.load_model` loads it.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.checkup.case import Case
from tasks.checkup.findings import Finding, Unseen, failed, passed, warned

FLOAT = 4  # bytes
TIGHT = 0.8  # share of what is there, from which on an estimate is a warning
LONG_HOURS = 24
KEPT_CHECKPOINTS = 3  # two are kept, a third is being written
COPIES = 2  # of what DVC tracks: in artifacts/ and in its cache
TRAJECTORY_BYTES = 20  # a token, as stored; 5.6 KB were measured for 300 tokens
PROCESS_BYTES = 700 << 20  # Python with torch and transformers, before any weights
LOGITS_AT_ONCE = 3 << 26  # the bytes of learning/policy.py's largest chunk: logits, their exponentials, a gradient
# Measured on the demo (2 cores): what a step of the engine costs a layer, what a token costs beside its arithmetic, and
# the share of the rate of plain matrix products that training reaches.
LAYER_SECONDS, TOKEN_SECONDS, EFFICIENCY = 0.0004, 20e-6, 0.4
START_SECONDS = 5  # a stage's imports and loading
MEASURE_SECONDS = 0.15
LARGEST_MATRIX = 1024
OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
}
CGROUP = Path("/sys/fs/cgroup")


def threads(case: Case) -> Finding:
    wanted, there = case.settings.num_threads, num_processors()
    if wanted > there:
        return warned(
            f"num_threads is {wanted}, and this process may use {there} processor{'s' * (there != 1)}",
            f"More threads than processors slow each other down. Set num_threads to {there} (results will differ in "
            f"the last digits).",
        )
    return passed(f"num_threads is {wanted}, of {there} processors")


def memory(case: Case) -> Finding:
    needed, there = memory_needed(case), available_memory()
    told = f"training takes about {amount(needed)}, {amount(there)} are free"
    remedy = (
        "Lower engine.max_concurrent_episodes or train.micro_batch_tokens, set train.gradient_checkpointing or "
        "train.lora, or take a larger machine."
    )
    return _against(needed, there, told, remedy)


def disk(case: Case) -> Finding:
    needed, there = disk_needed(case), shutil.disk_usage(_existing(case.paths.artifacts)).free
    told = f"results take about {amount(needed)}, {amount(there)} are free"
    remedy = (
        f"There are {num_snapshots(case):,} snapshots of {amount(weights_bytes(case))}. Raise train.snapshot_interval, "
        f"free some space, or move paths.artifacts."
    )
    return _against(needed, there, told, remedy)


def duration(case: Case) -> Finding:
    """Training and evaluation, from the rate at which this machine multiplies and the lengths of references."""
    rate = matrix_rate(case)
    train, evaluate = train_seconds(case, rate), evaluate_seconds(case, rate)
    told = f"a guess: train {spell(train)}, evaluate {spell(evaluate)} ({rate / 1e9:,.0f} GFLOP/s)"
    if train + evaluate > LONG_HOURS * 3600:
        return warned(told, "Lower train.num_iterations, take a smaller model, or plan for it; a killed run goes on.")
    return passed(told)


def memory_needed(case: Case) -> float:
    """Bytes at the height of training: weights and what mirrors them, the engine's cache, one micro-batch.

    Full fine-tuning holds gradients and AdamW's two averages (Muon's one, at most), and a frozen reference where KL
    asks for it. LoRA trains a sliver, and holds a second copy of the weights for the engine.
    """
    train, shape = case.settings.train, case.model.config
    mirrors = 1 + (1 if train.lora else 3 + (train.kl_weight > 0))
    hidden = size(case, "hidden_size")
    inner = shape.get("intermediate_size") or 4 * hidden
    cache = case.settings.engine.max_concurrent_episodes * case.settings.sampling.max_tokens_per_episode
    # What backward needs of a layer: about twelve vectors of the hidden size and four of the MLP's, a position.
    a_layer = hidden if train.gradient_checkpointing else 12 * hidden + 4 * inner
    positions = max(train.micro_batch_tokens, case.settings.sampling.max_tokens_per_episode)
    logits = min(LOGITS_AT_ONCE, 3 * FLOAT * positions * size(case, "vocab_size"))
    activations = FLOAT * positions * size(case, "num_hidden_layers") * a_layer
    return PROCESS_BYTES + weights_bytes(case) * mirrors + cache * key_value_bytes(case) + activations + logits


def disk_needed(case: Case) -> float:
    """Bytes of snapshots, of the checkpoints under way, and of the trajectories of assess, evaluate and promote."""
    train, weights = case.settings.train, weights_bytes(case)
    state = 3 + (train.kl_weight > 0)  # policy, AdamW's two averages, reference
    a_trajectory = case.settings.sampling.max_tokens_per_episode * TRAJECTORY_BYTES
    if train.lora:
        weights = 0.1 * weights  # an adapter is smaller than that
    assess = case.settings.assess
    episodes = sum(math.prod(pair) for pair in evaluated(case)) + assess.num_problems * assess.samples_per_problem
    kept = COPIES * (num_snapshots(case) * weights + episodes * a_trajectory)
    return kept + KEPT_CHECKPOINTS * state * weights + weights_bytes(case)  # the last is the registry's


def train_seconds(case: Case, rate: float) -> float:
    """Rollouts of all iterations, the reference's forward, and mu times forward and backward (three forwards)."""
    train, lengths = case.settings.train, _lengths(case)
    prompts = train.problems_per_iteration * (1 if train.packing == "tree" else train.group_size)
    episodes = train.problems_per_iteration * train.group_size
    tokens = prompts * lengths.prompt + episodes * lengths.rest
    forwards = 3 * train.mu + (train.kl_weight > 0)
    micro_batches = math.ceil(tokens / train.micro_batch_tokens)
    update = forwards * (tokens * operations(case) / rate + micro_batches * step_seconds(case))
    return START_SECONDS + train.num_iterations * (rollout_seconds(case, episodes, rate) + update)


def evaluate_seconds(case: Case, rate: float) -> float:
    return START_SECONDS + sum(models * rollout_seconds(case, episodes, rate) for models, episodes in evaluated(case))


def rollout_seconds(case: Case, episodes: int, rate: float) -> float:
    """The arithmetic of every token, the bookkeeping of those after the prompt, and the engine's steps: one for each
    such token of an episode, all episodes that fit at once.
    """
    lengths = _lengths(case)
    rounds = max(lengths.longest_rest, lengths.rest * episodes / case.settings.engine.max_concurrent_episodes)
    arithmetic = episodes * (lengths.prompt + lengths.rest) * operations(case) / rate
    return arithmetic + episodes * lengths.rest * TOKEN_SECONDS + rounds * step_seconds(case)


def operations(case: Case) -> float:
    """Of one token's forward: two a weight."""
    return 2.0 * case.model.num_parameters


def step_seconds(case: Case) -> float:
    """What a forward costs however little is in it."""
    return size(case, "num_hidden_layers") * LAYER_SECONDS


def evaluated(case: Case) -> list[tuple[int, int]]:
    """How many models evaluate plays, and the episodes of each: every snapshot on select; base, warm start and best on
    test.
    """
    options, problems = case.settings.evaluate, case.problems
    on_select = len(problems["select"]) * options.select_samples_per_problem
    return [(num_snapshots(case), on_select), (3, len(problems["test"]) * options.test_samples_per_problem)]


def num_snapshots(case: Case) -> int:
    """One at each interval, and one at the end."""
    return math.ceil(case.settings.train.num_iterations / case.settings.train.snapshot_interval)


def weights_bytes(case: Case) -> float:
    return FLOAT * case.model.num_parameters


def key_value_bytes(case: Case) -> float:
    """Keys and values of one token in every layer."""
    config, heads = case.model.config, size(case, "num_attention_heads")
    head_size = config.get("head_dim") or size(case, "hidden_size") // heads
    return 2 * FLOAT * size(case, "num_hidden_layers") * (config.get("num_key_value_heads") or heads) * head_size


def matrix_rate(case: Case) -> float:
    """Operations a second that training may count on, from products shaped like the model's in float32.

    Measured on one thread, of which `num_threads` are taken to do as much each: on a machine that is busy with
    something else, several threads wait for each other and say nothing about a quiet one.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    hidden = min(LARGEST_MATRIX, size(case, "hidden_size"))
    inner = min(LARGEST_MATRIX, case.model.config.get("intermediate_size") or 4 * hidden)
    one, other = np.ones((256, hidden), dtype=np.float32), np.ones((hidden, inner), dtype=np.float32)
    best, until = 0.0, time.perf_counter() + MEASURE_SECONDS
    with threadpool_limits(1):
        while not best or time.perf_counter() < until:
            started = time.perf_counter()
            one @ other
            best = max(best, 2 * one.size * inner / (time.perf_counter() - started))
    return EFFICIENCY * best * min(case.settings.num_threads, num_processors())


def available_memory() -> float:
    """Bytes this process may still take: the machine's, or less where a container is given less."""
    import psutil

    available = float(psutil.virtual_memory().available)
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    return available if limit is None or used is None else max(0.0, min(available, limit - used))


def num_processors() -> int:
    """Those this process may use: by affinity, and by the share a container is given."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = _words(CGROUP / "cpu.max")
    if len(share) == 2 and share[0].isdigit():
        processors = min(processors, math.ceil(int(share[0]) / int(share[1])))
    return processors


def amount(num_bytes: float) -> str:
    """`3 MB`, `1.4 GB`."""
    for unit in ("KB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{num_bytes:.1f} {unit}" if num_bytes < 9.95 else f"{num_bytes:.0f} {unit}"
    return f"{num_bytes / 1000:,.1f} TB"


def spell(seconds: float) -> str:
    """`40 s`, `7 min`, `3.5 h`, `12 days`."""
    for limit, unit, length in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.1f} {unit}" if unit == "h" else f"{max(1, seconds / length):.0f} {unit}"
    return f"{seconds / 86400:,.0f} days"


def _against(needed: float, there: float, told: str, remedy: str) -> Finding:
    if needed > there:
        return failed(told, remedy)
    return warned(told, remedy) if needed > TIGHT * there else passed(told)


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Tokens of the references: prompt and what follows it, on average, and the longest that follows."""

    prompt: float
    rest: float
    longest_rest: int


def _lengths(case: Case) -> _Lengths:
    """Of the references; the budgets where none could be played."""
    masks = [golden.trajectory.sampled_mask for golden in case.references]
    if not masks:
        budget = case.settings.sampling.max_tokens_per_episode
        return _Lengths(0, budget, budget)
    prompts = [mask.index(True) for mask in masks]
    rests = [len(mask) - prompt for mask, prompt in zip(masks, prompts, strict=True)]
    return _Lengths(sum(prompts) / len(masks), sum(rests) / len(masks), max(rests))


def size(case: Case, name: str) -> int:
    """A number of config.json, by whatever name the architecture has for it."""
    config = case.model.config
    found = next((config[key] for key in (name, *OTHER_NAMES.get(name, ())) if config.get(key)), None)
    if found is None:
        remedy = "Watch memory and time of the first iterations; nothing here can estimate them."
        raise Unseen(f"the model's config.json tells no {name}, by which this is estimated", remedy)
    return int(found)


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _number(file: Path) -> float | None:
    words = _words(file)
    return float(words[0]) if words and words[0].isdigit() else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
