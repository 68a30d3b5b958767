"""Base, warm start and best on the same problems of test told in parts, and how much of their success that costs.

Each problem is paired with itself told at once. How noisy the user is, is measured by replays: the best snapshot plays
the same episodes again with the same random numbers of its own, so what differs is the user's doing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.records import Problem, Trajectory
from tasks.core.terminal import tell
from tasks.core.text import counted
from tasks.environments.catalog import load_environment
from tasks.measurement.points import difference_text
from tasks.stages.evaluate.runner import EpisodeRunner, Store
from tasks.stages.evaluate.settings import EvaluateSections, ShardedSettings
from tasks.tools.user.environment import ReplayedUser
from tasks.tools.user.hidden import shards_of
from tasks.tools.user.settings import Reveal, UserSettings

if TYPE_CHECKING:
    from tasks.tools.base import Environment

Played = Mapping[str, list[Trajectory]]
SCRIPT = UserSettings(played_by="script", reveal="at_once", model=None)
SPLIT, AT_ONCE = "sharded", "at_once"


def measure_sharded(
    settings: EvaluateSections,
    problems: Sequence[Problem],
    models: Mapping[str, Path],
    on_test: Played,
    *,
    resume: Path,
    store: Store,
) -> dict[str, Any]:
    """The row of `evaluate.sharded`, empty where it is null; `store` keeps the episodes of each model."""
    options = settings.evaluate.sharded
    if options is None:
        return {}
    in_parts = _play(settings, options.reveal, problems, models, resume, SPLIT)
    if settings.environment.is_told_at_once:
        at_once = {name: of_problems(played, problems) for name, played in on_test.items()}
    else:
        at_once = _play(settings, "at_once", problems, models, resume, AT_ONCE)
        for name, played in at_once.items():
            store(f"{AT_ONCE}_{name}", played)
    for name, played in in_parts.items():
        store(f"{SPLIT}_{name}", played)
    replays = [in_parts["best"]]
    for number in range(1, options.num_replays):
        again = {"best": models["best"]}
        replays.append(
            _play(settings, options.reveal, problems, again, resume, f"{SPLIT}_{number}", replay=number)["best"]
        )
    row = {
        **describe_drop(at_once, in_parts, confidence=settings.evaluate.confidence),
        "reveal": options.reveal,
        "played_by": (settings.environment.user or SCRIPT).played_by,
        "noise": noise_of(replays),
    }
    tell(f"told in parts: {counted(len(problems), 'problem')} of test")
    for name, drop in row["drop"].items():
        tell(
            f"  {name.replace('_', ' ')}: at once {row['at_once'][name]['success_rate']:.1%}, in parts "
            f"{row['results'][name]['success_rate']:.1%}; points lost: {difference_text(drop)}"
        )
    return row


def choose_problems(
    environment: Environment, test: Sequence[Problem], options: ShardedSettings | None
) -> list[Problem]:
    """The first problems of test that have parts; none without options. ValueError where none has."""
    if options is None:
        return []
    found = [problem for problem in test if len(shards_of(environment, problem)) > 1][: options.num_problems]
    if not found:
        raise ValueError(
            "evaluate.sharded: no problem of test has parts, so none could be told in them. Write them in "
            "world.user.shards of the problems, or set evaluate.sharded to null."
        )
    return found


def describe_drop(at_once: Played, in_parts: Played, *, confidence: float) -> dict[str, Any]:
    """Each policy's two results, and the paired difference between them: what is lost by telling in parts."""
    from tasks.measurement.statistics import paired_difference, summarise

    return {
        "results": {name: summarise(played, confidence=confidence) for name, played in in_parts.items()},
        "at_once": {name: summarise(at_once[name], confidence=confidence) for name in in_parts},
        "drop": {
            name: paired_difference(at_once[name], played, confidence=confidence) for name, played in in_parts.items()
        },
    }


def noise_of(replays: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """Between replays of the same episodes (in the same order): the mean variance of success, the share of episodes
    whose success changed, and the standard error which that alone gives the success rate. Null with one replay. An
    episode that some replay lost to an environment error is left out.
    """
    episodes = [
        [float(played.is_success) for played in again]
        for again in zip(*replays, strict=True)
        if not any(played.is_lost for played in again)
    ]
    if len(replays) < 2 or not episodes:
        return {"num_replays": len(replays), "num_episodes": len(episodes), "variance": None, "changed_share": None,
                "standard_error": None}  # fmt: skip
    means = [sum(row) / len(row) for row in episodes]
    spread = [
        sum((value - mean) ** 2 for value in row) / (len(row) - 1) for row, mean in zip(episodes, means, strict=True)
    ]
    return {
        "num_replays": len(replays),
        "num_episodes": len(episodes),
        "variance": round(sum(spread) / len(episodes), 6),
        "changed_share": round(sum(len(set(row)) > 1 for row in episodes) / len(episodes), 6),
        "standard_error": round((sum(spread) ** 0.5) / len(episodes), 6),
    }


def of_problems(played: Sequence[Trajectory], problems: Sequence[Problem]) -> list[Trajectory]:
    kept = {problem.id for problem in problems}
    return [trajectory for trajectory in played if trajectory.problem_id in kept]


def _play(
    settings: EvaluateSections,
    reveal: Reveal,
    problems: Sequence[Problem],
    models: Mapping[str, Path],
    resume: Path,
    split: str,
    *,
    replay: int = 0,
) -> dict[str, list[Trajectory]]:
    """Play with the section's user, a script where there is none, who reveals so much. All replays and both ways have
    the random streams of one stage.
    """
    assert settings.evaluate.sharded is not None
    user = (settings.environment.user or SCRIPT).model_copy(update={"reveal": reveal})
    section = settings.environment.model_copy(update={"user": user})
    play = settings.play(settings.evaluate.sharded.samples_per_problem, drawn_from=settings.evaluate.sampling)
    with (
        closing(load_environment(section)) as environment,
        closing(EpisodeRunner(ReplayedUser(environment, replay), plays={split: play}, resume=resume)) as runner,
    ):
        runner.expect(models.values())
        return {name: runner.play(model, problems, split, name, stage=SPLIT) for name, model in models.items()}
