"""What a run would need, by `tasks/planning/`: memory, disk and time from the settings, the model's size and the
lengths of references.

Every estimate is rough: it separates hours from days, and megabytes from terabytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from tasks.commands.doctor.context import DoctorContext
from tasks.commands.doctor.findings import NotCheckable, Skipped
from tasks.core.records import TokenSequence
from tasks.environments.settings import EnvironmentSettings
from tasks.learning.grpo.exploration import iterations_by_samples
from tasks.learning.shared.settings import GRPOSettings
from tasks.models.torch_setup import device_name
from tasks.planning.hardware import measured, this_machine
from tasks.planning.memory import checkpoint_bytes, model_bytes, snapshot_bytes
from tasks.planning.plays import SPLITS, plays_of
from tasks.planning.seconds import Lengths, Seconds, plan_seconds
from tasks.planning.setup import PlanSections, Setup
from tasks.planning.shapes import UnknownShape, config_shape
from tasks.stages.evaluate.reflexion import attempts_for
from tasks.stages.evaluate.settings import EvaluateSettings

KEPT_CHECKPOINTS = 3  # two are kept, a third is being written
COPIES = 2  # of what DVC tracks: in artifacts/ and in its cache
TRAJECTORY_BYTES = 20  # per token, as stored; 5.6 KB were measured for 300 tokens


def planned_setup(context: DoctorContext) -> Setup:
    """This machine, and the model that training would start from. ValueError where its device is not there."""
    settings, model = context.settings, context.model
    device_name(settings.compute)
    sections = PlanSections(
        compute=settings.compute,
        launch=settings.launch,
        engine=settings.engine,
        sampling=settings.sampling,
        warm_start=settings.warm_start,
        train=settings.train,
    )
    try:
        shape = config_shape(model.source, model.config, num_parameters=model.num_parameters)
    except UnknownShape as error:
        found, _, remedy = str(error).partition(". ")
        raise NotCheckable(found, remedy) from None
    plays = plays_of(settings.model_dump(), _sizes(context))
    return Setup(shape, sections, this_machine(settings.compute), plays)


def _sizes(context: DoctorContext) -> dict[str, int]:
    """Problems of the splits that are played beside training."""
    return {split: len(context.problems[split]) for split in SPLITS}


def seconds_needed(context: DoctorContext) -> Seconds:
    setup = planned_setup(context)
    machine = measured(
        setup.machine,
        hidden=setup.shape.hidden,
        inner=setup.shape.inner,
        num_threads=setup.settings.compute.num_threads,
    )
    if not machine.rate:
        raise NotCheckable(
            f"the speed of {machine.name} is not known", "Time the first iterations, or `python -m tasks plan --gpu`."
        )
    settings = context.settings
    episodes = evaluated_episodes(settings.train, settings.evaluate, settings.environment, _sizes(context))
    timed = replace(setup, machine=machine)
    has_warm_start = settings.assess.may_warm_start
    return plan_seconds(timed, _lengths(context), evaluated_episodes=episodes, has_warm_start=has_warm_start)


def agent_seconds_needed(context: DoctorContext, seconds_per_episode: float) -> float:
    """Of the agent's own time, in all episodes of training and evaluation, as many at once as the engine plays."""
    settings = context.settings
    episodes = first_drawn_episodes(settings.train)
    episodes += evaluated_episodes(settings.train, settings.evaluate, settings.environment, _sizes(context))
    return episodes * seconds_per_episode / settings.engine.max_concurrent_episodes


def disk_needed(context: DoctorContext) -> float:
    """Bytes of snapshots, of the current checkpoints, and of the trajectories of assess, evaluate and promote."""
    setup, settings = planned_setup(context), context.settings
    a_trajectory = settings.sampling.max_tokens_per_episode * TRAJECTORY_BYTES
    episodes = evaluated_episodes(settings.train, settings.evaluate, settings.environment, _sizes(context))
    episodes += settings.assess.num_problems * settings.assess.samples_per_problem
    kept = COPIES * (num_snapshots(settings.train) * snapshot_bytes(setup) + episodes * a_trajectory)
    return kept + KEPT_CHECKPOINTS * checkpoint_bytes(setup) + model_bytes(setup)  # the last is the registry's


def evaluated_episodes(
    train: GRPOSettings, evaluate: EvaluateSettings, environment: EnvironmentSettings, num_problems: Mapping[str, int]
) -> int:
    """The most that models here play: every snapshot on select; base, warm start and best on test, greedily, in parts
    and in other environments too; the best's replays; and every attempt of Reflexion and of the same without notes.
    """
    on_select = num_problems["select"] * evaluate.select_samples_per_problem
    on_test = num_problems["test"] * (evaluate.test_samples_per_problem + evaluate.greedy)
    in_parts, replays = 0, 0
    if (told := evaluate.sharded) is not None:
        a_play = min(told.num_problems or num_problems["test"], num_problems["test"]) * told.samples_per_problem
        in_parts = a_play if environment.is_told_at_once else 2 * a_play  # test itself is then no play at once
        replays = (told.num_replays - 1) * a_play
    elsewhere = sum(other.num_problems * other.samples_per_problem for other in evaluate.also)
    of_three = 3 * (on_test + in_parts + elsewhere)
    return (
        num_snapshots(train) * on_select + of_three + replays + _later_attempts(train, evaluate, num_problems["test"])
    )


def _later_attempts(train: GRPOSettings, evaluate: EvaluateSettings, num_problems: int) -> int:
    """The most episodes after the first attempts, which are those of test: all fail, with notes and without."""
    if evaluate.reflexion is None or not num_problems:
        return 0
    return 2 * (attempts_for(evaluate.reflexion, first_drawn_episodes(train), num_problems) - 1) * num_problems


def first_drawn_episodes(train: GRPOSettings) -> int:
    """Of the whole training, without what dynamic sampling draws in the place of others."""
    return train.problems_per_iteration * sum(size * count for size, count in iterations_by_samples(train).items())


def num_snapshots(train: GRPOSettings) -> int:
    return math.ceil(train.num_iterations / train.snapshot_interval)


def _lengths(context: DoctorContext) -> Lengths:
    """Of the references; a whole budget where none could be played."""
    try:
        sequences = [reference.trajectory.sequences[0] for reference in context.references]
    except Skipped:
        budget = context.settings.sampling.max_tokens_per_episode
        return Lengths(0, budget, 0, budget)
    return lengths_of(sequences)


def lengths_of(sequences: Sequence[TokenSequence]) -> Lengths:
    """Of episodes of one sequence each."""
    masks = [sequence.sampled_mask for sequence in sequences]
    prompts = [mask.index(True) for mask in masks]
    sampled = [sum(mask) for mask in masks]
    rests = [len(mask) - prompt for mask, prompt in zip(masks, prompts, strict=True)]
    mean_sampled = sum(sampled) / len(masks)
    starts = [sequence.token_ids[:prompt] for sequence, prompt in zip(sequences, prompts, strict=True)]
    num_shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*starts, strict=False)))
    return Lengths(
        sum(prompts) / len(masks),
        mean_sampled,
        sum(rests) / len(masks) - mean_sampled,
        max(rests),
        shared=num_shared,
    )
