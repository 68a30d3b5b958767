"""plan: does it fit, how long does it take, what does it cost? Before anything is downloaded or started.

Reads params.yaml or profiles, a model's config.json or a known name, and figures of a machine. Which of its constants
were measured, and on what, is in `tasks/planning/`: everything of a GPU is a published peak times an assumed share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tasks.commands.doctor.estimates import evaluated_episodes, first_drawn_episodes, lengths_of
from tasks.commands.profile import read_profiles
from tasks.core.files import read_jsonl
from tasks.core.machine import total_memory
from tasks.core.records import Trajectory
from tasks.core.settings import PARAMS_FILE, Paths, Settings, load, load_paths, parse_params, read_params
from tasks.core.splits import read_split
from tasks.core.urls import local_path
from tasks.environments.settings import EnvironmentSettings
from tasks.models.settings import ModelSettings
from tasks.planning.hardware import GPUS, Machine, amount, find_gpu, measured, this_machine
from tasks.planning.memory import plan_memory, share_fault, warm_start_memory
from tasks.planning.nearest import (
    TIGHT,
    describe,
    fits,
    longest_episode,
    nearest_that_fits,
    warm_start_that_fits,
)
from tasks.planning.parts import Memory
from tasks.planning.plays import curated_problems, plays_of, problems_at_most
from tasks.planning.seconds import Lengths, Seconds, assumed_lengths, plan_seconds, rollout_seconds
from tasks.planning.setup import PlanSections, Setup, measured_at_once
from tasks.planning.shapes import KNOWN, Shape, find_shape, shape_of
from tasks.rollouts.settings import SamplingSettings
from tasks.stages.assess.settings import AssessSettings
from tasks.stages.curate.settings import CurateSettings
from tasks.stages.evaluate.settings import EvaluateSettings
from tasks.stages.train.outlook import Outlook, expect, read_baseline

ESTIMATE = {
    True: "An estimate: no GPU figure was measured; published peaks × assumed shares.",
    False: "An estimate: the matrix rate is this processor's, every share and overhead is the demo's.",
}
OF_SEVERAL = "memory is that of rank 0 of {}, times and dollars are of one; `plan --gpus` simulates several trainers"
OF_SERVERS = "a run takes {} GPUs, {} of them for vLLM's servers; times and dollars are of one GPU"
WORST_CASE = "the budget of sampling, the worst case; give --tokens PROMPT SAMPLED REPLIES"


class EvaluationSections(Settings):
    model: ModelSettings
    assess: AssessSettings
    environment: EnvironmentSettings
    curate: CurateSettings
    evaluate: EvaluateSettings


@dataclass(frozen=True, slots=True)
class Plan:
    """`seconds` is None where it does not fit and where the machine's speed is not known."""

    setup: Setup
    lengths: Lengths
    memory: Memory
    seconds: Seconds | None
    evaluated_episodes: int  # the most
    fits_on: dict[str, str]  # machine: "yes", "tight", the settings with which it fits, or "no"
    warm_start: float | None  # bytes of a warm start, where there may be one
    head: tuple[str, ...]  # what was planned, in lines for people
    is_own_price: bool
    outlook: Outlook | None  # of the signal, where the model that training starts from was played

    @property
    def is_warm_start_too_large(self) -> bool:
        return self.warm_start is not None and self.warm_start > self.setup.machine.memory

    @property
    def share_fault(self) -> str | None:
        return share_fault(self.setup)

    @property
    def does_fit(self) -> bool:
        return fits(self.setup) and not self.is_warm_start_too_large

    def as_row(self) -> dict[str, Any]:
        """Everything, for a program."""
        machine, seconds = self.setup.machine, self.seconds
        dollars = seconds.dollars(machine.dollars_per_hour) if seconds else (None, None)
        return {
            "model": asdict(self.setup.shape),
            "estimate": ESTIMATE[machine.is_gpu],
            "machine": {**asdict(machine), "rate": dict(machine.rate)},
            "lengths": asdict(self.lengths),
            "memory": {**{part.name: asdict(part) for part in self.memory.parts}, "peak": self.memory.peak},
            "fits": self.does_fit,
            "share_fault": self.share_fault,
            "fits_on": self.fits_on,
            "warm_start": self.warm_start,
            "longest_episode": longest_episode(self.setup),
            "seconds": seconds and {**asdict(seconds), **_totals(seconds)},
            "evaluated_episodes": self.evaluated_episodes,
            "tokens_per_day": seconds and seconds.tokens_per_day,
            **dict(zip(("dollars", "dollars_most"), dollars, strict=True)),
            "signal": self.outlook and self.outlook.as_row(),
        }


def make_plan(
    model: str | None = None,
    gpu: str | None = None,
    profiles: Sequence[str] = (),
    dollars_per_hour: float | None = None,
    tokens: tuple[int, int, int] | None = None,
) -> Plan:
    """ValueError for a model, a machine or a profile that is not known, and for lengths that no episode has."""
    params = parse_params(read_profiles(profiles), PARAMS_FILE) if profiles else read_params()
    settings, sections = load(PlanSections, params), load(EvaluationSections, params)
    check_tokens(tokens, settings.sampling)
    shape = shape_of(sections.model) if model is None else find_shape(model)
    machine = choose_machine(gpu, settings, shape)
    if dollars_per_hour is not None:
        machine = replace(machine, dollars_per_hour=dollars_per_hour)
    played = None if profiles or model else load_paths(params)
    sizes = (curated_problems(played, params) if played else None) or problems_at_most(params)
    setup = Setup(shape, settings, machine, plays_of(params, sizes))
    line, lengths = _choose_lengths(setup, tokens, played)
    episodes = evaluated_episodes(settings.train, sections.evaluate, sections.environment, sizes)
    is_timed, has_warm_start = fits(setup) and bool(machine.rate), sections.assess.may_warm_start
    seconds = (
        plan_seconds(setup, lengths, evaluated_episodes=episodes, has_warm_start=has_warm_start) if is_timed else None
    )
    return Plan(
        setup=setup,
        lengths=lengths,
        memory=plan_memory(setup),
        seconds=seconds,
        evaluated_episodes=episodes,
        fits_on=_fits_on(setup, has_warm_start=has_warm_start),
        warm_start=warm_start_memory(setup).peak if has_warm_start else None,
        head=_head(setup, model or sections.model.path, profiles, line),
        is_own_price=dollars_per_hour is not None,
        outlook=_outlook(settings, played, tokens) if played else None,
    )


def check_tokens(tokens: tuple[int, int, int] | None, sampling: SamplingSettings) -> None:
    """ValueError for lengths that no episode has, or none within the budgets of sampling."""
    if tokens is None:
        return
    prompt, sampled, replies = tokens
    limit = sampling.token_limit(prompt)
    remedy = None
    if min(prompt, sampled) < 1 or replies < 0:
        remedy = "Give at least 1 token of prompt, 1 sampled and 0 of replies."
    elif sum(tokens) > limit:
        budgets = ("max_tokens_per_episode", "max_completion_tokens")
        names = [f"sampling.{name} {value:,}" for name in budgets if (value := getattr(sampling, name)) is not None]
        remedy = (
            f"They are {sum(tokens):,} tokens, and {' and '.join(names)} end an episode at {limit:,}: give fewer, the "
            f"--profile that has room for them, or raise the budget."
        )
    if remedy is not None:
        raise ValueError(
            f"--tokens {' '.join(map(str, tokens))}: no episode has these lengths, so no time follows from them. "
            f"{remedy}"
        )


def train_seconds(plan: Plan, *, group_size: int | None, episodes: float) -> float | None:
    """Of training alone with this group size, None: as set; replaced groups cost their rollout."""
    if plan.seconds is None:
        return None
    setup = plan.setup if group_size is None else plan.setup.with_samples(group_size)
    seconds = plan_seconds(setup, plan.lengths, evaluated_episodes=0)
    replaced = episodes - first_drawn_episodes(setup.settings.train)
    return seconds.train + (rollout_seconds(setup, plan.lengths, replaced) if replaced > 0 else 0.0)


def _choose_lengths(setup: Setup, tokens: tuple[int, int, int] | None, played: Paths | None) -> tuple[str, Lengths]:
    """Those that were given, those of episodes that were played, or the longest; told before them in a line."""
    if tokens is not None:
        return _told(Lengths(*tokens, longest=tokens[1] + tokens[2]))
    found = played_lengths(played) if played else None
    return found or (f"lengths: {WORST_CASE}", assumed_lengths(setup))


def _told(lengths: Lengths, whose: str = "") -> tuple[str, Lengths]:
    numbers = f"{lengths.prompt:,.0f} of prompt, {lengths.sampled:,.0f} sampled, {lengths.replies:,.0f} of replies"
    return f"lengths: {numbers}{whose}", lengths


def played_lengths(paths: Paths) -> tuple[str, Lengths] | None:
    """Of the episodes of the model that training starts from, told; None before some were played here, and where an
    agent's have several sequences, each of which is read by itself.
    """
    for stage in ("warm_start", "assess"):
        file = paths.stage(stage) / "trajectories.jsonl"
        if file.exists():
            sequences = [Trajectory.from_row(row).sequences for _, row in read_jsonl(file)]
            played = [item[0] for item in sequences if item and any(item[0].sampled_mask)]
            if not played or any(len(item) > 1 for item in sequences):
                return None
            return _told(lengths_of(played), f", the means of {len(played):,} played by {stage}")
    return None


def _outlook(settings: PlanSections, paths: Paths, tokens: tuple[int, int, int] | None) -> Outlook | None:
    """None until the model that training starts from was played; of episodes as long as `tokens` say."""
    if not paths.split("train").exists() or (baseline := read_baseline(paths)) is None:
        return None
    if tokens is not None:
        baseline = replace(baseline, sampled_tokens=float(tokens[1]))
    return expect(settings.train, read_split(paths, "train"), baseline)


def choose_machine(gpu: str | None, settings: PlanSections, shape: Shape) -> Machine:
    """The one that is named, or the one that `compute.device` means here."""
    if gpu is not None and gpu.lower() != "cpu":
        return find_gpu(gpu)
    compute = settings.compute if gpu is None else settings.compute.model_copy(update={"device": "cpu"})
    machine = this_machine(compute)
    if not machine.is_gpu and compute.device == "cuda":
        raise ValueError(
            f"compute.device is cuda and there is no GPU here, so there is nothing to plan for. Name one: --gpu "
            f"{', '.join(GPUS)} or cpu."
        )
    return measured(machine, hidden=shape.hidden, inner=shape.inner, num_threads=compute.num_threads)


def _fits_on(setup: Setup, *, has_warm_start: bool) -> dict[str, str]:
    told = {}
    for name, machine in GPUS.items():
        there = replace(setup, machine=machine)
        changes = nearest_that_fits(there)
        if changes is None:
            told[name] = "no"
            continue
        own = warm_start_that_fits(there, changes) if has_warm_start else []
        changes += own or []
        parts = [f"with {describe(changes)}"] if changes else []
        parts += ["without a warm start"] if own is None else []
        told[name] = ", ".join(parts) or ("tight" if is_tight(there) else "yes")
    return told


def is_tight(setup: Setup) -> bool:
    return plan_memory(setup).peak > TIGHT * setup.machine.memory


def _head(setup: Setup, model: str, profiles: Sequence[str], lengths: str) -> tuple[str, ...]:
    """Which model, settings and lengths."""
    shape, compute, lora = setup.shape, setup.settings.compute, setup.settings.train.lora
    kind = f"LoRA, {compute.frozen} base" if lora else f"full, {compute.weights}"
    source = f"profile {' with '.join(profiles)}" if profiles else PARAMS_FILE
    by_name = shape.name in KNOWN and not local_path(model).is_dir()
    return (
        f"{shape.name} ({_weights(shape)}) on {_machine_line(setup.machine)}",
        *([f"{model}: no such folder, planned by its name"] if by_name else []),
        f"settings of {source}: {kind}, engine {setup.settings.engine.name}",
        lengths,
        f"episodes at once: {setup.at_once:,} of a batch, up to {measured_at_once(setup):,} where a model is measured",
        *_of_several(setup),
        ESTIMATE[setup.machine.is_gpu],
    )


def _of_several(setup: Setup) -> list[str]:
    """What the tables leave out where a run takes more than one trainer, or more than one GPU."""
    settings = setup.settings
    num_trainers, num_servers = settings.launch.num_trainers, settings.engine.own.num_own_servers
    told = [OF_SEVERAL.format(num_trainers)] if num_trainers > 1 else []
    if setup.machine.is_gpu and num_servers:
        served = num_servers * settings.gpus_per_engine
        told.append(OF_SERVERS.format(num_trainers + served, served))
    return told


def _weights(shape: Shape) -> str:
    number = shape.num_parameters
    told = f"{number / 1e9:,.2f} billion weights" if number >= 1e8 else f"{number / 1e6:,.2f} million weights"
    return f"{told}, {shape.experts.active} of {shape.experts.total} experts per token" if shape.experts else told


def _machine_line(machine: Machine) -> str:
    if machine.is_gpu:
        return f"{machine.name} with {amount(machine.memory)}"
    return f"{machine.name}, {amount(machine.memory)} free of {amount(total_memory())}"


def _totals(seconds: Seconds) -> dict[str, float]:
    return {name: getattr(seconds, name) for name in ("iteration", "total", "total_most")}


def as_json(plan: Plan) -> str:
    return json.dumps(plan.as_row(), indent=1)
