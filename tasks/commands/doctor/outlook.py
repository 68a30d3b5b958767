"""Warnings right after curation: what the data allows with the model and settings of params.yaml.

They are not part of curation, so changing the model or the budgets replays no solution (infra/decisions/0025).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from tasks.commands.doctor.context import DoctorContext, DoctorSections
from tasks.commands.doctor.findings import of_error
from tasks.commands.doctor.size_of_test import more_test_problems
from tasks.core.files import read_json
from tasks.core.settings import Paths, load, load_paths, read_params
from tasks.core.splits import read_split
from tasks.core.terminal import warn
from tasks.stages.evaluate.sharded import choose_problems

COARSE = 0.25  # hardly any run gains that much success


def print_outlook() -> None:
    params = read_params()
    for sentence in warnings(params, load_paths(params)):
        warn(f"warning: {sentence}")


def warnings(params: dict[str, Any], paths: Paths) -> list[str]:
    settings = load(DoctorSections, params)
    sizes = read_json(paths.stage("curate") / "card.json")["num_problems"]
    with closing(DoctorContext(settings, paths, is_fresh=True)) as context:
        return [*_small_splits(settings, paths, sizes), *_parts(context, paths), *_budgets(context, paths)]


def _small_splits(settings: DoctorSections, paths: Paths, sizes: dict[str, int]) -> Iterator[str]:
    evaluate = settings.evaluate
    for split, samples in (
        ("select", evaluate.select_samples_per_problem),
        ("test", evaluate.test_samples_per_problem),
    ):
        smallest = smallest_difference(settings, num_problems=sizes[split], samples_per_problem=samples)
        if smallest > COARSE:
            shows = f"only a difference of {100 * smallest:.0f} points of success" if smallest < 1 else "no difference"
            yield (
                f"{split} has {sizes[split]:,} problems, {samples} episode{'s' * (samples > 1)} each: {shows} could "
                f"be detected. Bring more problems (curate.source, "
                f"curate.num_generated, curate.max_{split}_problems), or raise evaluate.{split}_samples_per_problem."
            )
    if sizes["test"] < (asked := settings.promote.min_unseen_problems):
        yield (
            f"test has {sizes['test']:,} problems and promote.min_unseen_problems asks for {asked:,}, so no snapshot "
            f"could be promoted. {more_test_problems(settings, paths)}"
        )
    wanted = settings.train.problems_per_iteration
    if sizes["train"] < wanted:
        yield (
            f"train has {sizes['train']:,} problems and train.problems_per_iteration is {wanted}, so every iteration "
            f"plays all of them. Bring more problems, or lower that setting."
        )


def smallest_difference(settings: DoctorSections, *, num_problems: int, samples_per_problem: int) -> float:
    """The true difference of success that evaluation would find with its `power`, near 50% success."""
    from tasks.measurement.power import minimum_detectable_difference

    return minimum_detectable_difference(
        num_problems=num_problems,
        samples_per_problem=samples_per_problem,
        confidence=settings.evaluate.confidence,
        power=settings.evaluate.power,
    )


def _parts(context: DoctorContext, paths: Paths) -> Iterator[str]:
    """What the doctor would refuse after assess: problems to be told in parts that have none."""
    if (told := context.settings.evaluate.sharded) is None:
        return
    try:
        environment = context.environment
    except Exception:  # `_budgets` tells it
        return
    try:
        choose_problems(environment, read_split(paths, "test"), told)
    except Exception as error:  # of a class of the user's, too: curation is done, and must not fail
        yield str(error)


def _budgets(context: DoctorContext, paths: Paths) -> Iterator[str]:
    """References that do not fit the token budgets; a note where the model cannot be read."""
    from tasks.rollouts.budgets import fit, sampled_sizes

    try:
        sizes = sampled_sizes(context.chat, context.environment, paths, context.problems)
        found = fit(sizes, context.settings.sampling)
        if found.cut:
            yield f"{found.sentence}. {found.remedy(context.model.config)}"
    except Exception as error:  # curation must not fail because a model is missing
        finding = of_error(error)
        yield f"the token budgets could not be checked: {finding.text}. {finding.remedy}"
