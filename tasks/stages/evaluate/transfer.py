"""Transfer: base, warm start and best in environments that training never saw (`evaluate.also`). Decides nothing.

That an environment was never seen is checked twice: its name is none that this run trains on, and no problem of it is
one that a snapshot or an ancestor learnt from. All of it is checked before the first episode of evaluate, and by the
doctor before training. What a base model read before it came here nobody can check. The field's claim of this kind:
PROVE (arXiv:2606.03892) trains on its own servers and reports BFCL, τ²-bench and T-Eval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tasks.chat.format import ChatFormat
from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.core.terminal import tell, warn
from tasks.core.text import counted
from tasks.environments.catalog import load_bare_environment, load_environment, read_problems_of
from tasks.measurement.points import difference_text
from tasks.rollouts.fault_log import TooManyFaults
from tasks.stages.evaluate.runner import EpisodeRunner, Store
from tasks.stages.evaluate.scripted_baselines import measure_baselines
from tasks.stages.evaluate.settings import AlsoSettings, EvaluateSections
from tasks.tools.base import Environment
from tasks.tools.replay import Script, play
from tasks.tools.user.environment import check_user

HIGHEST_LEVEL = 100


class OtherProblems(NamedTuple):
    """Those whose reference solution scores 1, and how many were left out since theirs does not."""

    solvable: list[Problem]
    num_unsolvable: int


def read_others(
    settings: EvaluateSections, chat: ChatFormat, config: Mapping[str, Any], learners: Iterable[Path]
) -> dict[str, OtherProblems]:
    """What is played in each environment of `evaluate.also`, by label. ValueError where it cannot be played by a model
    of this chat format and config.json, or where one of the `learners` has learnt from it.
    """
    models = list(learners)
    return {other.label: _read_other(other, settings, chat, config, models) for other in settings.evaluate.also}


def _read_other(
    other: AlsoSettings, settings: EvaluateSections, chat: ChatFormat, config: Mapping[str, Any], learners: list[Path]
) -> OtherProblems:
    from tasks.rollouts.prompt_room import check_prompts

    try:
        with closing(load_bare_environment(other.within(settings.environment))) as environment:
            found = solvable_problems(other, environment, seed=settings.seed)
            for problem in found.solvable:  # the bare environment has no user to refuse it
                check_user(environment, settings.environment.user, problem)
            played = settings.play_in(other).sampling
            check_prompts(chat, config, environment, found.solvable, played, budget_key=other.budget_key)
        for learner in learners:
            refuse_seen(found.solvable, learner)
    except ValueError as error:
        raise ValueError(f"evaluate.also, {other.label}: {error}") from None
    return found


def measure_transfer(
    settings: EvaluateSections,
    others: Mapping[str, OtherProblems],
    models: Mapping[str, Path],
    *,
    resume: Path,
    store: Store,
) -> dict[str, dict[str, Any]]:
    """A row per environment of `evaluate.also`, by label; `store` keeps the episodes of each model. An environment that
    lost too many episodes has none, after a warning: it decides nothing, and the stage would end for it.
    """
    rows = {}
    for other in settings.evaluate.also:
        try:
            rows[other.label] = _measure(other, settings, others[other.label], models, resume, store)
        except TooManyFaults as lost:
            warn(_left_out(other.label, lost))
    return rows


def _left_out(label: str, lost: TooManyFaults) -> str:
    _, *table = str(lost).splitlines()
    told = (
        f"warning: evaluate.also, {label}: lost more episodes than environment.tools.max_dropped_share allows, so it "
        f"has no row in evaluation.json; it decides nothing, and evaluate goes on. Repair the tools below, then run "
        f"`dvc repro --force --single-item evaluate` to have it."
    )
    return "\n".join([told, *table])


def _measure(
    other: AlsoSettings,
    settings: EvaluateSections,
    problems: OtherProblems,
    models: Mapping[str, Path],
    resume: Path,
    store: Store,
) -> dict[str, Any]:
    from tasks.measurement.statistics import paired_difference, summarise

    confidence, split = settings.evaluate.confidence, f"also_{other.label}"
    section = other.within(settings.environment)
    with closing(load_environment(section)) as environment:
        fingerprint = environment.fingerprint()
        # DVC does not watch data and packages of an environment, so the folder's name does, as for `test`.
        own = resume / json_hash(fingerprint)[:16]
        with closing(EpisodeRunner(environment, plays={split: settings.play_in(other)}, resume=own)) as runner:
            runner.expect(models.values())
            played = {name: runner.play(model, problems.solvable, split, name) for name, model in models.items()}
        baselines = measure_baselines(environment, problems.solvable, confidence=confidence)
    for name, trajectories in played.items():
        store(f"{split}_{name}", trajectories)
    row = {
        "environment": other.name,
        "fingerprint": fingerprint,
        "num_unsolvable": problems.num_unsolvable,
        "results": {name: summarise(trajectories, confidence=confidence) for name, trajectories in played.items()},
        "gain": paired_difference(played["best"], played["base"], confidence=confidence),
        "gain_over_warm_start": paired_difference(played["best"], played["warm_start"], confidence=confidence),
        "baselines": baselines,
    }
    tell(f"also in {other.label}, which training never saw: {_in_words(row)}")
    return row


def solvable_problems(other: AlsoSettings, environment: Environment, *, seed: int) -> OtherProblems:
    """Of the bare environment; ValueError where no reference solution scores 1."""
    level = other.max_level or HIGHEST_LEVEL
    problems = read_problems_of(environment, other, seed=seed, num_problems=other.num_problems, max_level=level)
    played = play(environment, [Script.reference(problem) for problem in problems])
    solved = [
        problem
        for problem, found in zip(problems, played, strict=True)
        if not environment.knows_solution(problem) or (found.verdict is not None and found.verdict.success)
    ]
    if not solved:
        raise ValueError(
            f"no reference solution of {counted(len(problems), 'problem')} scores 1, so no policy could. Check its "
            f"`source` and `settings`, or leave the environment out."
        )
    return OtherProblems(solved, len(problems) - len(solved))


def refuse_seen(problems: list[Problem], model: Path) -> None:
    """ValueError where the model or an ancestor learnt from one of these problems."""
    from tasks.models.trained_on import read_trained_on

    seen = read_trained_on(model).seen_ids(problems, by_group=False)
    if seen:
        raise ValueError(
            f"{len(seen)} of {len(problems)} problems, such as {min(seen)!r}, are ones that the model or an ancestor "
            f"learnt from, so success there is no transfer. Name other problems, or leave the environment out."
        )


def _in_words(row: Mapping[str, Any]) -> str:
    base, best, gain = row["results"]["base"], row["results"]["best"], row["gain"]
    return (
        f"base {base['success_rate']:.1%}, best {best['success_rate']:.1%}, difference "
        f"{difference_text(gain)} points on {counted(best['num_problems'], 'problem')}"
    )
