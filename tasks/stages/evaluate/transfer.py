"""Transfer: base, warm start and best in environments that training never saw (`evaluate.also`). Decides nothing.

That an environment was never seen is checked twice: its name is none that this run trains on, and no problem of it is
one that the best snapshot or an ancestor learnt from. What a base model read before it came here nobody can check. The
field's claim of this kind: PROVE (arXiv:2606.03892) trains on its own servers and reports BFCL, τ²-bench and T-Eval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.core.records import Problem, Trajectory
from tasks.core.terminal import tell
from tasks.environments.catalog import load_bare_environment, load_environment, read_problems_of
from tasks.stages.evaluate.runner import EpisodeRunner
from tasks.stages.evaluate.scripted_baselines import measure_baselines
from tasks.stages.evaluate.settings import AlsoSettings, EvaluateSections
from tasks.tools.replay import Script, play

Store = Callable[[str, list[Trajectory]], None]
HIGHEST_LEVEL = 100


def measure_transfer(
    settings: EvaluateSections, models: Mapping[str, Path], *, resume: Path, store: Store
) -> dict[str, dict[str, Any]]:
    """A row per environment of `evaluate.also`, by label; `store` keeps the episodes of each model."""
    return {other.label: _measure(other, settings, models, resume, store) for other in settings.evaluate.also}


def _measure(
    other: AlsoSettings, settings: EvaluateSections, models: Mapping[str, Path], resume: Path, store: Store
) -> dict[str, Any]:
    from tasks.measurement.statistics import paired_difference, summarise

    confidence, split = settings.evaluate.confidence, f"also_{other.label}"
    problems, num_unsolvable = solvable_problems(other, settings)
    refuse_seen(other, problems, models["best"])
    section = other.within(settings.environment)
    with (
        closing(load_environment(section)) as environment,
        closing(EpisodeRunner(environment, plays={split: settings.play_in(other)}, resume=resume)) as runner,
    ):
        runner.expect(models.values())
        played = {name: runner.play(model, problems, split, name) for name, model in models.items()}
        baselines = measure_baselines(environment, problems, confidence=confidence)
        fingerprint = environment.fingerprint()
    for name, trajectories in played.items():
        store(f"{split}_{name}", trajectories)
    row = {
        "environment": other.name,
        "fingerprint": fingerprint,
        "num_unsolvable": num_unsolvable,
        "results": {name: summarise(trajectories, confidence=confidence) for name, trajectories in played.items()},
        "gain": paired_difference(played["best"], played["base"], confidence=confidence),
        "gain_over_warm_start": paired_difference(played["best"], played["warm_start"], confidence=confidence),
        "baselines": baselines,
    }
    tell(f"also in {other.label}, which training never saw: {_in_words(row)}")
    return row


def solvable_problems(other: AlsoSettings, settings: EvaluateSections) -> tuple[list[Problem], int]:
    """The problems whose reference solution scores 1, and how many were left out since theirs does not."""
    with closing(load_bare_environment(other.within(settings.environment))) as environment:
        level = other.max_level or HIGHEST_LEVEL
        problems = read_problems_of(
            environment, other, seed=settings.seed, num_problems=other.num_problems, max_level=level
        )
        played = play(environment, [Script.reference(problem) for problem in problems])
    solved = [
        problem
        for problem, found in zip(problems, played, strict=True)
        if found.verdict is not None and found.verdict.success
    ]
    if not solved:
        raise ValueError(
            f"evaluate.also: no reference solution of {len(problems)} problems of {other.label} scores 1, so no "
            f"policy could. Check its `source` and `settings`, or leave the environment out."
        )
    return solved, len(problems) - len(solved)


def refuse_seen(other: AlsoSettings, problems: list[Problem], best: Path) -> None:
    """ValueError where the best snapshot or an ancestor learnt from a problem of this environment."""
    from tasks.models.trained_on import read_trained_on

    seen = read_trained_on(best).seen_ids(problems, by_group=False)
    if seen:
        raise ValueError(
            f"evaluate.also: {len(seen)} of {len(problems)} problems of {other.label}, such as {min(seen)!r}, are ones "
            f"that the snapshot or an ancestor learnt from, so success there is no transfer. Name other problems, or "
            f"leave the environment out."
        )


def _in_words(row: Mapping[str, Any]) -> str:
    base, best, gain = row["results"]["base"], row["results"]["best"], row["gain"]
    return (
        f"base {base['success_rate']:.1%}, best {best['success_rate']:.1%}, difference {gain['difference']:+.1%} "
        f"({gain['ci_low']:+.1%} to {gain['ci_high']:+.1%}) on {best['num_problems']} problems"
    )
