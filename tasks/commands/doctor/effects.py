"""Check of settings that are accepted and change little or nothing: a limit on what is not measured, and what comes
after the end of a run. They are not refused, since a shortened run keeps those of the long one.
"""

from __future__ import annotations

from collections.abc import Iterator

from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.findings import Finding, passed, warned
from tasks.learning.shared.settings import OptimizerSettings


def settings_take_effect(context: DoctorContext) -> Finding:
    found = [*_without_effect(context.settings)]
    if not found:
        return passed("the learning rate is reached, and what moves or watches the reference has an effect")
    texts, remedies = zip(*found, strict=True)
    return warned("; ".join(texts), " ".join(remedies))


def _without_effect(settings: DoctorSections) -> Iterator[tuple[str, str]]:
    """What was found, and the remedy."""
    train, warm_start, sentinel = settings.train, settings.warm_start, settings.sentinel
    num_steps = train.num_iterations * train.updates_per_batch * train.steps_per_batch
    yield from _rate_not_reached("train", train, num_steps)
    if settings.assess.may_warm_start:
        yield from _rate_not_reached("warm_start", warm_start, warm_start.num_steps)
    if train.reference_interval is not None and train.reference_interval >= train.num_iterations > 1:
        yield (
            f"train.reference_interval is {train.reference_interval} and train.num_iterations {train.num_iterations}, "
            f"so no update sees the reference move",
            "Set train.reference_interval below train.num_iterations, or to null.",
        )
    if train.band.levels is not None and train.problem_sampler != "band":
        yield (
            f"train.band.levels is set and train.problem_sampler {train.problem_sampler}, so problems of all levels "
            f"are drawn from the start",
            "Set train.problem_sampler to band, or train.band.levels to null.",
        )
    if train.kl_weight == 0 and sentinel.max_kl is not None:
        yield (
            f"sentinel.max_kl is {sentinel.max_kl:g} and train.kl_weight 0, so KL is not measured and the limit "
            f"watches nothing",
            "Set sentinel.max_kl to null, or train.kl_weight above 0.",
        )


def _rate_not_reached(section: str, settings: OptimizerSettings, num_steps: int) -> Iterator[tuple[str, str]]:
    if settings.warmup_steps > num_steps:
        yield (
            f"{section}.warmup_steps is {settings.warmup_steps}, of {num_steps} optimizer steps in all, so the highest "
            f"rate is at most {num_steps / settings.warmup_steps:.0%} of {section}.learning_rate",
            f"Lower {section}.warmup_steps, such as to {num_steps // 10}.",
        )
