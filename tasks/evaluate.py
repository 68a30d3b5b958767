"""evaluate: choose a snapshot on `select`, then confirm it, the warm start and the base on `test`.

Every snapshot meets the same `select` problems with the same random numbers; the best by success rate alone goes on
(ties: the earlier one). Only then does a model that is chosen touch `test`. The world's own `baselines`, where it has
any, stand beside them, and the model behind an endpoint that `evaluate.frontier` names: yardsticks that nothing is
decided by, played first, so that a wrong key shows before an hour of evaluation. Never reads the registry: whether to
promote is the next stage's question.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tasks.environments.catalog import load_environment
from tasks.environments.options import EnvironmentSettings
from tasks.pinning import check_pin
from tasks.problems import read_split
from tasks.records import Problem, Trajectory
from tasks.rollouts.openai_engine import FrontierSettings
from tasks.rollouts.options import EngineSettings, SamplingSettings
from tasks.settings import Paths, Settings
from tasks.storage import atomic_folder, require, write_json, write_jsonl

if TYPE_CHECKING:
    from tasks.environments.base import Environment
    from tasks.rollouts.load import Engines


class EvaluateOptions(Settings):
    """How many episodes a problem, the confidence of every interval, and the endpoint to compare with (null: none)."""

    select_samples_per_problem: int = Field(ge=1)
    test_samples_per_problem: int = Field(ge=1)
    confidence: float = Field(gt=0.5, lt=1)
    frontier: FrontierSettings | None


class EvaluateSettings(Settings):
    seed: int
    num_threads: int = Field(ge=1)
    environment: EnvironmentSettings
    engine: EngineSettings
    sampling: SamplingSettings
    evaluate: EvaluateOptions


SETTINGS = EvaluateSettings


def run(settings: EvaluateSettings, paths: Paths) -> None:
    from tasks.baselines import measure_baselines
    from tasks.measurement.statistics import paired_difference, summarise
    from tasks.models import weights_hash
    from tasks.rollouts.load import Engines

    confidence = settings.evaluate.confidence
    snapshots = sorted(require(paths.stage("train") / "snapshots").iterdir())
    select, test = read_split(paths, "select"), read_split(paths, "test")
    checked = check_pin(settings.environment, paths, stage="evaluate")
    engines = Engines(settings.engine, settings.sampling, num_threads=settings.num_threads)
    with (
        atomic_folder(paths.stage("evaluate")) as folder,
        closing(load_environment(settings.environment)) as world,
        closing(engines),
    ):
        baselines = measure_baselines(world, test, confidence=confidence)
        frontier = play_frontier(world, test, settings, folder / "test_frontier") if settings.evaluate.frontier else []
        on_select = {}
        for snapshot in snapshots:
            played = play(snapshot, world, select, "select", settings, folder / f"select_{snapshot.name}", engines)
            on_select[snapshot.name] = summarise(played, confidence=confidence)
        best = max(on_select, key=lambda name: on_select[name]["success_rate"])
        models = {
            "base": paths.stage("assess") / "base_model",
            "warm_start": paths.stage("warm_start") / "model",
            "best": paths.stage("train") / "snapshots" / best,
        }
        on_test = {
            name: play(model, world, test, "test", settings, folder / f"test_{name}", engines)
            for name, model in models.items()
        }
        evaluation: dict[str, Any] = {
            "best_snapshot": best,
            "confidence": confidence,
            "select": on_select,
            "test": {name: summarise(played, confidence=confidence) for name, played in on_test.items()},
            "gain_over_warm_start": paired_difference(on_test["best"], on_test["warm_start"], confidence=confidence),
            "weights": {name: weights_hash(model) for name, model in models.items()},
            "environment": checked.to_row(),
        }
        if baselines:
            evaluation["baselines"] = baselines
        if settings.evaluate.frontier is not None:
            evaluation["frontier"] = frontier_row(settings.evaluate, frontier, on_test["best"])
        write_json(folder / "evaluation.json", evaluation)


def play(
    model: Path,
    world: Environment,
    problems: list[Problem],
    split: str,
    settings: EvaluateSettings,
    out: Path,
    engines: Engines,
) -> list[Trajectory]:
    """Episodes of one model on one split; the stage name of their random numbers is the split's, so models share
    them.
    """
    from tasks.rollouts.collect import sample_episodes

    samples = {
        "select": settings.evaluate.select_samples_per_problem,
        "test": settings.evaluate.test_samples_per_problem,
    }
    name = out.name.removeprefix(f"{split}_")
    trajectories = sample_episodes(
        model,
        world,
        problems,
        engine=settings.engine,
        sampling=settings.sampling,
        seed=settings.seed,
        stage=split,
        samples_per_problem=samples[split],
        num_threads=settings.num_threads,
        label=f"{split}: {name.replace('_', ' ')}",
        engines=engines,
    )
    write_jsonl(out.parent / "trajectories" / f"{out.name}.jsonl", (trajectory.to_row() for trajectory in trajectories))
    return trajectories


def play_frontier(
    world: Environment, problems: list[Problem], settings: EvaluateSettings, out: Path
) -> list[Trajectory]:
    """Episodes of the model behind the endpoint; the random numbers of its tools are those other models meet."""
    from tasks.rollouts.openai_engine import Endpoint
    from tasks.rollouts.text_collect import play as play_messages

    assert settings.evaluate.frontier is not None
    with closing(Endpoint(settings.evaluate.frontier)) as endpoint:
        trajectories = play_messages(
            endpoint,
            world,
            problems,
            max_turns=settings.sampling.max_turns,
            seed=settings.seed,
            stage="test",
            label=f"test: {endpoint.name}",
        )
    write_jsonl(out.parent / "trajectories" / f"{out.name}.jsonl", (trajectory.to_row() for trajectory in trajectories))
    return trajectories


def frontier_row(options: EvaluateOptions, played: list[Trajectory], best: list[Trajectory]) -> dict[str, Any]:
    """The frontier model's result, what it took, and how far the best snapshot is from it on the same problems."""
    from tasks.measurement.statistics import paired_difference, summarise
    from tasks.measurement.usage import mean_usage

    assert options.frontier is not None
    problems = {trajectory.problem_id for trajectory in played}
    on_the_same = [trajectory for trajectory in best if trajectory.problem_id in problems]
    usage = mean_usage(played)
    return {
        **options.frontier.model_dump(include={"model", "url", "temperature", "max_output_tokens"}),
        "is_reproducible": False,  # an endpoint takes no seed of ours and may change the model behind a name
        "result": {
            **summarise(played, confidence=options.confidence),
            "mean_sampled_tokens": usage["output_tokens"],
        },
        "usage_per_episode": usage,
        "best_minus_frontier": paired_difference(on_the_same, played, confidence=options.confidence),
    }
