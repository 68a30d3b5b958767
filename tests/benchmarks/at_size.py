"""One iteration of a model of a real size, with random weights, and the episodes of the next: memory and seconds of the
phases, in a process of its own.

It is `TrainingRun` as the train stage runs it, with the engine, the trainer, checkpoints and snapshots; only the
episodes are written here: prompts of random tokens, and replies that come whatever the model wrote. The tokenizer is
the embedded one, whose words are the first of the model's 152 thousand.

`python -m tests.benchmarks.at_size iterate|resume FOLDER VARIANT` prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.settings import load
from tests.benchmarks.made_up import random_ids
from tests.conftest import ROOT
from tests.profiles import profile_params

if TYPE_CHECKING:
    from tasks.core.records import Group
    from tasks.planning.shapes import Shape
    from tasks.rollouts.engine import Engine
    from tasks.stages.train.run import TrainingRun

PROMPT, REPLY, SAMPLED, TURNS = 2800, 200, 16, 2  # tokens, and turns of an episode
GROUPS, GROUP_SIZE = 2, 4
NUM_WORDS = 1000  # of which prompts and replies are
LORA = {"rank": 16, "alpha": 32, "target_modules": "all-linear"}
VLLM_ON_THE_SAME_GPU = {
    "mode": "in_process", "urls": [], "num_servers": 1, "enforce_eager": False, "kv_cache_gib": 1,
    "gpu_memory_utilization": 0.4, "tensor_parallel_size": 1, "transfer": "ipc",
    "folder": "artifacts/bench/vllm-weights", "start_timeout_seconds": 900.0, "request_timeout_seconds": 600.0,
    "max_restarts": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """`dtype` of all weights, trained and frozen."""

    model: str
    dtype: str
    has_lora: bool
    prompt: int = PROMPT
    device: str = "cpu"
    num_threads: int = 2
    engine: str = "transformers"  # or vllm, on the trainer's GPU
    offload: str = "none"
    layers: int | None = None  # of the model's; None: all

    @property
    def name(self) -> str:
        return f"{self.model}, {self.dtype}, {'LoRA' if self.has_lora else 'full'}"


def variant_params(variant: Variant) -> dict[str, Any]:
    """The profile `my_model` with this model and its size of an iteration."""
    params = profile_params("my_model")
    params["compute"] |= {"device": variant.device, "num_threads": variant.num_threads}
    params["compute"] |= {"weights": variant.dtype, "frozen": variant.dtype, "offload": variant.offload}
    params["model"]["path"] = variant.model
    params["engine"]["max_concurrent_episodes"] = GROUPS * GROUP_SIZE
    if variant.engine == "vllm":
        params["engine"] |= {"name": "vllm", "settings": VLLM_ON_THE_SAME_GPU | {"dtype": variant.dtype}}
    rest = TURNS * SAMPLED + (TURNS - 1) * REPLY
    longest = variant.prompt + GROUP_SIZE * rest  # a group is one packed row
    params["sampling"] |= {"max_tokens_per_turn": SAMPLED, "max_tokens_per_episode": variant.prompt + rest}
    params["train"] |= {
        "lora": LORA if variant.has_lora else None, "problems_per_iteration": GROUPS, "group_size": GROUP_SIZE,
        "updates_per_batch": 1, "micro_batch_tokens": longest, "checkpoint_interval": 1, "snapshot_interval": 1,
    }  # fmt: skip
    return params


def build_folder(folder: Path, variant: Variant) -> None:
    """Random weights in the shape of a known model, and the embedded tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tasks.models.folders import save_snapshot
    from tasks.planning.shapes import KNOWN
    from tests import tiny

    family, all_layers, hidden, inner, heads, key_value_heads, head_size, vocabulary, is_tied = KNOWN[variant.model]
    layers = variant.layers or all_layers
    config = AutoConfig.for_model(
        family, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=key_value_heads, head_dim=head_size, vocab_size=vocabulary, tie_word_embeddings=is_tied,
        max_position_embeddings=32_768, max_window_layers=layers,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(variant.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, variant.dtype))
    save_snapshot(folder, model, tiny.tokenizer())


@dataclass(slots=True)
class Peaks:
    """The most memory (bytes) and the seconds of each phase. With an engine in another process on the same GPU its
    memory counts too: what it has when the phase ends.
    """

    has_others: bool
    memory: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def mark(self, phase: str) -> None:
        """The phase ends here, and the next begins."""
        now = time.perf_counter()
        peak = peak_memory() + (memory_of_others() if self.has_others else 0.0)
        self.memory[phase] = max(self.memory.get(phase, 0.0), peak)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.started
        print(f"{phase}: {self.memory[phase] / 1e9:.2f} GB, {self.seconds[phase]:.0f} s", file=sys.stderr, flush=True)
        self.started = now


def peak_memory() -> float:
    """Since the last call: of the GPU where torch uses one, else of this process."""
    import torch

    if torch.cuda.is_initialized():
        peak = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return peak
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = 1024.0 * int(status.partition("VmHWM:")[2].split()[0])
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # proc(5): resets VmHWM
    return peak


def memory_of_others() -> float:
    """Bytes of the GPU that are not torch's in this process: those of vLLM's, and of whoever else uses it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


def start_run(folder: Path, variant: Variant) -> TrainingRun:
    from tasks.stages.train.run import TrainingRun
    from tasks.stages.train.settings import TrainSections
    from tests import tiny

    settings = load(TrainSections, variant_params(variant))
    return TrainingRun(settings, start=folder / "model", problems=tiny.problems(8), resume=folder / "resume")


def iterate(folder: Path, variant: Variant) -> dict[str, Any]:
    """Rollout, update, snapshot with the checkpoint's copy, and the next rollout while the checkpoint is written, each
    with its peak; the run is closed.
    """
    peaks = Peaks(has_others=variant.engine == "vllm")
    run = start_run(folder, variant)
    take_empty_step(run)
    peaks.mark("load")

    def collect(iteration: int, round_number: int, num_problems: int) -> list[Group]:
        groups = play(run.engine, num_problems, prompt=variant.prompt)
        if not run.engine.has_own_memory:  # else it is counted awake, and the run itself has it sleep
            run.engine.sleep()
        peaks.mark("rollout")
        return groups

    save = run.snapshots.save

    def save_after_update() -> None:
        peaks.mark("update")
        save()

    run.collect = run.stopwatch.timed("collect_seconds", collect)
    run.snapshots.save = save_after_update  # type: ignore[method-assign]
    row, alarm = run.iterate()
    assert alarm is None, alarm
    peaks.mark("save")
    serve(run)
    play(run.engine, GROUPS, prompt=variant.prompt)
    run.close()  # when the checkpoint is written
    peaks.mark("next rollout")
    return {**asdict(peaks), "peak": max(peaks.memory.values()), "grad_norm": row["grad_norm"], "sum": policy_sum(run)}


def resume(folder: Path, variant: Variant) -> dict[str, Any]:
    """Load model and checkpoint, as a killed run does."""
    peaks = Peaks(has_others=variant.engine == "vllm")
    run = start_run(folder, variant)
    peaks.mark("resume")
    run.close()
    return {**asdict(peaks), "iteration": run.iteration, "sum": policy_sum(run)}


def take_empty_step(run: TrainingRun) -> None:
    """Gradients of zero: afterwards the optimizer has its averages, as in every iteration but the first."""
    import torch

    optimizer = run.trainer.optimizer
    for master in optimizer.masters:
        master.grad = torch.zeros_like(master)
    optimizer.step(position=0)


def serve(run: TrainingRun) -> None:
    """The engine plays with the newest policy, as at the start of an iteration."""
    run.serving.refresh(run.iteration)


def policy_sum(run: TrainingRun) -> float:
    """Of all trained weights, in float64: equal where the policy is."""
    return float(sum(tensor.double().sum().item() for tensor in run.trainer.tensors()["policy"].values()))


@dataclass(slots=True)
class Episode:
    """What was written so far."""

    token_ids: list[int]
    sampled_mask: list[bool]
    sampler_logp: list[float]

    def add(self, ids: Sequence[int], logp: Sequence[float] | None = None) -> None:
        """A reply, or what the policy sampled with these log-probs."""
        self.token_ids += ids
        self.sampled_mask += [logp is not None] * len(ids)
        self.sampler_logp += [0.0] * len(ids) if logp is None else logp


def play(engine: Engine, num_groups: int, *, prompt: int) -> list[Group]:
    """Groups of one prompt each, all at once: `TURNS` turns of random tokens, and a reply before all but the first."""
    from tasks.rollouts.engine import TurnRequest

    episodes = [Episode([], [], []) for _ in range(num_groups * GROUP_SIZE)]
    for turn in range(TURNS):
        for handle, episode in enumerate(episodes):
            seed = handle // GROUP_SIZE if turn == 0 else 1000 * turn + handle
            reply = random_ids(REPLY if turn else prompt, NUM_WORDS, seed=seed)
            episode.add(reply)
            engine.submit(TurnRequest(handle, reply, SAMPLED, seed=1000 * turn + handle))
        num_waiting = len(episodes)
        while num_waiting:
            for answer in engine.poll():
                episodes[answer.episode].add(answer.token_ids, answer.sampler_logp)
                num_waiting -= 1
    for handle in range(len(episodes)):
        engine.release(handle)
    return [scored_group(episodes[start : start + GROUP_SIZE]) for start in range(0, len(episodes), GROUP_SIZE)]


def scored_group(episodes: Sequence[Episode]) -> Group:
    """Every second one earns 1."""
    from tasks.core.records import Group, Score, TokenSequence, Trajectory

    trajectories = [
        Trajectory(
            problem_id="p", category="made up", request="", draw=0, sample_index=index, policy_version=0,
            environment_fingerprint="",
            sequences=[TokenSequence(episode.token_ids, episode.sampled_mask, episode.sampler_logp)],
            turns=[], outcome="success" if index % 2 else "failure",
            limit=None, checks={}, num_calls=0, num_invalid_calls=0,
        )
        for index, episode in enumerate(episodes)
    ]  # fmt: skip
    return Group("p", "made up", trajectories, [Score(float(index % 2), {}) for index in range(len(episodes))], 0)


def in_a_process(action: str, folder: Path, variant: Variant) -> dict[str, Any]:
    """What `main` prints, from a process of its own, since a peak is a process's."""
    command = [sys.executable, "-m", "tests.benchmarks.at_size", action, str(folder), json.dumps(asdict(variant))]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def planned(variant: Variant) -> dict[str, float]:
    """Bytes by `plan`: of each phase here, and at the peak. On a GPU without the process, whose memory torch does not
    count; with vLLM beside it, it is among those of others.
    """
    from tasks.planning.hardware import this_machine
    from tasks.planning.memory import PROCESS, plan_memory
    from tasks.planning.parts import Memory
    from tasks.planning.setup import PlanSections, Setup

    settings = load(PlanSections, variant_params(variant))
    memory = plan_memory(Setup(shape_of(variant), settings, this_machine(settings.compute)))
    if variant.device != "cpu" and variant.engine != "vllm":
        memory = Memory(tuple(part for part in memory.parts if part.name != PROCESS))
    phases = memory.phases
    checkpoint = sum(part.rollout for part in memory.parts if part.name == "checkpoint")  # the first has none yet
    return {
        "rollout": phases["playing"] - checkpoint, "update": phases["updating"], "save": phases["saving"],
        "next rollout": phases["playing"], "peak": memory.peak,
    }  # fmt: skip


def shape_of(variant: Variant) -> Shape:
    from tasks.planning.shapes import known_shape

    shape = known_shape(variant.model)
    if variant.layers is None:
        return shape
    cut = replace(shape, num_layers=variant.layers)
    left_out = shape.matrix_parameters - cut.matrix_parameters  # norms and biases are below 0.1% of these
    return replace(cut, num_parameters=shape.num_parameters - left_out)


def phase_table(measured: Mapping[str, float], told: Mapping[str, float]) -> str:
    """A line per phase: GB measured, GB planned, and their ratio where `plan` knows the phase."""
    lines = [f"{'phase':<14}{'measured':>10}{'planned':>10}{'ratio':>7}"]
    for phase, size in measured.items():
        line = f"{phase:<14}{size / 1e9:>7.2f} GB"
        if phase in told:
            line += f"{told[phase] / 1e9:>7.2f} GB{size / told[phase]:>7.2f}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    action, folder, told = arguments
    variant = Variant(**json.loads(told))
    if action == "build":
        build_folder(Path(folder) / "model", variant)
        print("{}")
        return
    print(json.dumps({"iterate": iterate, "resume": resume}[action](Path(folder), variant)))


if __name__ == "__main__":
    main(sys.argv[1:])
