"""Seconds of each phase of an iteration, and what a run comes to in hours, tokens per day and dollars.

Arithmetic is two operations per parameter and token, and attention's per pair of positions, at a share of the machine's
rate. **Measured**: the share and the overheads of a CPU, on the demo (2 cores of an AMD EPYC). **Assumed**: every share
and overhead of a GPU; the best published RL trainer uses 15–37% of its card's arithmetic. Read the result as hours or
days, not as minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tasks.learning.grpo.exploration import iterations_by_samples
from tasks.learning.shared.settings import GRPOSettings
from tasks.planning.memory import (
    cached_tokens,
    checkpoint_bytes,
    computes_in_half,
    optimizer_bytes,
    snapshot_bytes,
    trained_parameters,
)
from tasks.planning.plays import Play
from tasks.planning.setup import Setup, evaluation_setup, measured_at_once, warm_start_check, warm_start_setup

DAY = 86_400
START_SECONDS = 5  # a stage's imports and loading
# Measured on the demo, 2 cores.
CPU_EFFICIENCY, CPU_LAYER_SECONDS, TOKEN_SECONDS = 0.4, 0.0004, 20e-6
# Assumed of every GPU.
GPU_EFFICIENCY, GPU_BANDWIDTH_SHARE = 0.35, 0.6
GPU_LAYER_SECONDS = {"transformers": 0.0006, "vllm": 0.0002}  # of one step: launching kernels; vLLM has CUDA graphs
TENSOR_PARALLEL_SHARE = 0.8  # of the speed of all GPUs that an engine is cut over; they wait for each other's parts
HALF = 2  # bytes of a number in half precision
PCIE_BYTES, NCCL_BYTES, DISK_BYTES = 20e9, 20e9, 1e9  # per second


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of an episode: the prompt, what the policy samples and what tools reply; means, and the longest that
    follows a prompt. All prompts begin with the same `shared` ones; 0 where that is not known.
    """

    prompt: float
    sampled: float
    replies: float
    longest: float
    shared: float = 0.0

    @property
    def rest(self) -> float:
        return self.sampled + self.replies

    @property
    def total(self) -> float:
        return self.prompt + self.rest


def assumed_lengths(setup: Setup) -> Lengths:
    """Without data: episodes that use their whole budget, half of it prompt, the rest sampled and replies alike."""
    sampling = setup.settings.sampling
    total, most = sampling.max_tokens_per_episode, sampling.max_completion_tokens
    rest = total / 2 if most is None else min(total / 2, most)
    return Lengths(total - rest, rest / 2, rest / 2, rest)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one iteration by phase, what it waits for saving spread over its interval; `warm_start` (0 where there is
    none), `evaluate` and `total` are of the whole run. A warm start takes `warm_start` if its first attempt is good
    enough, and `warm_start_most` if it makes every one; `total` has the least, `total_most` the most.
    """

    rollout: float
    reference: float
    update: float
    refresh: float
    checkpoint: float
    warm_start: float
    warm_start_most: float
    evaluate: float
    num_iterations: int
    sampled_tokens: float

    @property
    def iteration(self) -> float:
        return self.rollout + self.reference + self.update + self.refresh + self.checkpoint

    @property
    def train(self) -> float:
        return START_SECONDS + self.num_iterations * self.iteration

    @property
    def total(self) -> float:
        return self.warm_start + self.train + self.evaluate

    @property
    def total_most(self) -> float:
        return self.warm_start_most + self.train + self.evaluate

    @property
    def tokens_per_day(self) -> float:
        """Sampled ones, while training."""
        return self.sampled_tokens / self.iteration * DAY

    def dollars(self, per_hour: float) -> tuple[float, float]:
        """The least and the most."""
        return self.total / 3600 * per_hour, self.total_most / 3600 * per_hour


def plan_seconds(setup: Setup, lengths: Lengths, *, evaluated_episodes: float, has_warm_start: bool = False) -> Seconds:
    """An iteration is the mean of all where their samples per problem are scheduled."""
    train = setup.settings.train
    sizes = [(setup.with_samples(size), count) for size, count in iterations_by_samples(train).items()]

    def mean(value: Callable[[Setup], float]) -> float:
        return sum(count * value(sized) for sized, count in sizes) / train.num_iterations

    forward = mean(lambda sized: _forward_seconds(sized, lengths))
    forwards = train.updates_per_batch * _forwards_per_step(train)
    forwards += 1 - 1 / train.steps_per_batch  # notes the old log-probs of all groups but the first step's
    num_steps = train.updates_per_batch * train.steps_per_batch
    warm_start, warm_start_most = _warm_start_seconds(setup, lengths) if has_warm_start else (0.0, 0.0)
    parts = {
        "rollout": mean(lambda sized: rollout_seconds(sized, lengths, sized.episodes)),
        "reference": forward if train.kl_weight else 0.0,
        "update": forwards * forward + num_steps * _optimizer_seconds(setup),
        "refresh": _refresh_seconds(setup),
    }
    saving, writing = saving_seconds(setup)
    return Seconds(
        **parts,
        checkpoint=saving + max(0.0, writing - sum(parts.values())),
        warm_start=warm_start,
        warm_start_most=warm_start_most,
        evaluate=START_SECONDS + rollout_seconds(_evaluation(setup, evaluated_episodes), lengths, evaluated_episodes),
        num_iterations=train.num_iterations,
        sampled_tokens=mean(lambda sized: sized.episodes * lengths.sampled),
    )


def _evaluation(setup: Setup, episodes: float) -> Setup:
    """As many at once as in the largest play, and as many of each problem as in the mean of all; where plays are not
    known, all at once, of a problem each.
    """
    at_once, problems = measured_at_once(setup) or episodes, sum(play.problems for play in setup.plays)
    samples = round(sum(play.problems * play.samples for play in setup.plays) / problems) if problems else 1
    return evaluation_setup(setup, Play("evaluate", math.ceil(at_once / samples), samples))


def _forwards_per_step(train: GRPOSettings) -> float:
    """A forward, and backward its products once for the gradients of inputs and once for those of weights, which a base
    that is frozen under LoRA has none of; the forward once more where activations are not kept. The adapter's own
    products are left out.
    """
    return 2.0 + (train.lora is None) + train.gradient_checkpointing


def _warm_start_seconds(setup: Setup, lengths: Lengths) -> tuple[float, float]:
    """The least and the most, of demonstrations as long as the episodes: one attempt, which a held-out loss may end
    early, and all of `stop.max_attempts`. Without `stop` both are the one attempt.
    """
    own, stop = setup.settings.warm_start, setup.settings.warm_start.stop
    if stop is None:
        seconds = START_SECONDS + _attempt_seconds(setup, lengths, num_steps=own.num_steps)
        return seconds, seconds
    soonest = min(own.num_steps, (1 + stop.patience) * stop.check_interval) if stop.held_out_share else own.num_steps
    least, most = (_attempt_seconds(setup, lengths, num_steps=number) for number in (soonest, own.num_steps))
    play = warm_start_check(setup, stop.num_problems)
    check = rollout_seconds(evaluation_setup(setup, play), lengths, play.problems)
    return START_SECONDS + least + check, START_SECONDS + stop.max_attempts * (most + check)


def _attempt_seconds(setup: Setup, lengths: Lengths, *, num_steps: int) -> float:
    own, alike = setup.settings.warm_start, warm_start_setup(setup)
    step = _forwards_per_step(alike.settings.train) * _forward_seconds(alike, lengths) + _optimizer_seconds(alike)
    interval, size = own.checkpoint_interval, checkpoint_bytes(alike)
    a_save = size / _copy_rate(setup) + max(0.0, size / DISK_BYTES - interval * step)
    return num_steps * step + num_steps // interval * a_save + snapshot_bytes(alike) / DISK_BYTES


def rollout_seconds(setup: Setup, lengths: Lengths, episodes: float) -> float:
    """Each group's prompt once and every reply, then a step per sampled token, shared by the episodes that fit at once.

    A step reads all weights and the live keys and values, or multiplies for every live episode: the slower of both.
    """
    most = max(1.0, min(setup.at_once, cached_tokens(setup) / lengths.total))
    prompts = episodes / setup.settings.train.group_size
    fed = prompts * lengths.prompt + episodes * lengths.replies
    live = min(episodes, most)
    step = decode_costs(setup, lengths).step_seconds(live)
    rounds = max(lengths.longest * lengths.sampled / max(1, lengths.rest), lengths.sampled * episodes / max(1, live))
    return fed * fed_token_seconds(setup, lengths) + rounds * step + episodes * lengths.rest * TOKEN_SECONDS


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Seconds of a step that writes a token of each live episode: `overhead`, and beside it the slower of reading the
    weights and every episode's keys and values (`weights`, `row`), and of the products (`row_arithmetic`).
    """

    overhead: float
    weights: float
    row: float
    row_arithmetic: float

    def step_seconds(self, live: float) -> float:
        return self.overhead + max(self.weights + self.row * live, self.row_arithmetic * live)


def decode_costs(setup: Setup, lengths: Lengths) -> DecodeCosts:
    shape = setup.shape
    size = setup.size_in_engine
    share = GPU_BANDWIDTH_SHARE if setup.machine.is_gpu else 1
    bandwidth = setup.machine.bandwidth * share * _engine_speedup(setup)
    return DecodeCosts(
        overhead=_step_overhead(setup),
        weights=size * shape.num_parameters / bandwidth,
        row=size * lengths.total * shape.key_value_elements / bandwidth,
        row_arithmetic=_token_operations(setup) / _engine_rate(setup),
    )


def fed_token_seconds(setup: Setup, lengths: Lengths) -> float:
    """Of a token of a prompt or a reply."""
    return (_token_operations(setup) + _pair_operations(setup) * lengths.total / 2) / _engine_rate(setup)


def _forward_seconds(setup: Setup, lengths: Lengths) -> float:
    """Of the batch that carries loss: where trees are packed, each group's prompt once, and in each forward the tokens
    with which all prompts begin.
    """
    train, is_tree = setup.settings.train, setup.settings.train.packing == "tree"
    prompts = train.problems_per_iteration * (1 if is_tree else train.group_size)
    shared = lengths.shared if is_tree else 0.0  # fewer than 64 are not, which is no matter here
    rest_of_prompt = lengths.prompt - shared
    own = prompts * rest_of_prompt + setup.episodes * lengths.rest
    room = train.micro_batch_tokens
    forwards = max(math.ceil(own / room), min(prompts, math.ceil(own / max(1.0, room - shared))))
    tokens = own + forwards * shared
    pairs = forwards * shared**2 / 2 + prompts * rest_of_prompt * (shared + rest_of_prompt / 2)
    pairs += setup.episodes * lengths.rest * (lengths.prompt + lengths.rest / 2)
    head = 2 * setup.shape.head_parameters * setup.episodes * lengths.sampled
    operations = 2 * setup.shape.matrix_parameters * tokens + head + _pair_operations(setup) * pairs
    return operations / _rate(setup, is_half=computes_in_half(setup)) + forwards * _step_overhead(setup)


def _token_operations(setup: Setup) -> float:
    return 2.0 * (setup.shape.matrix_parameters + setup.shape.head_parameters)


def _pair_operations(setup: Setup) -> float:
    """Two products of the head size, in every head and layer."""
    return 4.0 * setup.shape.num_heads * setup.shape.head_size * setup.shape.num_layers


def _engine_rate(setup: Setup) -> float:
    """`train.autocast` is the trainer's alone."""
    return _rate(setup, is_half=setup.size_in_engine == HALF) * _engine_speedup(setup)


def _engine_speedup(setup: Setup) -> float:
    """Of an engine over several GPUs, against one."""
    gpus = setup.settings.gpus_per_engine
    return TENSOR_PARALLEL_SHARE * gpus if gpus > 1 else 1.0


def _rate(setup: Setup, *, is_half: bool) -> float:
    share = GPU_EFFICIENCY if setup.machine.is_gpu else CPU_EFFICIENCY
    float32 = "tf32" if setup.machine.is_gpu and setup.settings.compute.tf32 else "float32"
    return share * setup.machine.rate["bfloat16" if is_half else float32]


def _step_overhead(setup: Setup) -> float:
    a_layer = GPU_LAYER_SECONDS[setup.settings.engine.name] if setup.machine.is_gpu else CPU_LAYER_SECONDS
    return setup.shape.num_layers * a_layer


def _optimizer_seconds(setup: Setup) -> float:
    """Reads and writes weights, gradients and state; offloaded state travels both ways."""
    moved = optimizer_bytes(setup)
    travel = 2 * moved / PCIE_BYTES if setup.settings.compute.offload == "optimizer" else 0.0
    return 2 * (moved + 8 * trained_parameters(setup)) / setup.machine.bandwidth + travel


def _refresh_seconds(setup: Setup) -> float:
    """New weights into an engine of its own: the adapter alone under LoRA."""
    if not setup.is_vllm:
        return 0.0
    own = setup.settings.engine.own
    size = trained_parameters(setup) * setup.size_in_engine
    rate = {"ipc": setup.machine.bandwidth, "nccl": NCCL_BYTES, "disk": DISK_BYTES / 2}
    return size / rate[getattr(own, "transfer", "disk")]


def saving_seconds(setup: Setup) -> tuple[float, float]:
    """Of an iteration. Training waits for the first, the copies of checkpoints and whole snapshots. The second is the
    writing of checkpoints, which goes on behind the iterations that follow; only the next save waits for its end.
    """
    train, size = setup.settings.train, checkpoint_bytes(setup)
    snapshot = snapshot_bytes(setup) / DISK_BYTES / train.snapshot_interval
    copy, write = (size / rate / train.checkpoint_interval for rate in (_copy_rate(setup), DISK_BYTES))
    return copy + snapshot, write


def _copy_rate(setup: Setup) -> float:
    """Of what is saved, to host memory; on a CPU it is read and written there."""
    return PCIE_BYTES if setup.machine.is_gpu else setup.machine.bandwidth / 2
