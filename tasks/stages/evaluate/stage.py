"""evaluate: choose a snapshot on `select`, then confirm it on `test` beside the base model and the warm start.

Snapshots race on `select` (`racing.py`); only the winner plays `test`. Scripted baselines and `evaluate.frontier`
decide nothing; they play first, so that a wrong API key fails before an hour of evaluation, as does a test without
parts where `evaluate.sharded` wants them. A model that plays again stays in memory where there is room, so its files
are read once. A killed stage plays only what is missing. Results must not contain seconds, which go to
artifacts/timings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import atomic_folder, content_hash, write_json, write_jsonl
from tasks.core.records import Problem, Trajectory
from tasks.core.resume import clear_resume
from tasks.core.settings import Paths
from tasks.core.terminal import tell, warn
from tasks.core.text import counted
from tasks.environments.catalog import load_environment
from tasks.rollouts.settings import DistributionSettings
from tasks.stages.evaluate.endpoint_baseline import frontier_row, measure_endpoint
from tasks.stages.evaluate.identity import hash_episodes, hash_folders, identify_models, refuse_altered
from tasks.stages.evaluate.inputs import Inputs, read_inputs
from tasks.stages.evaluate.noted import note_evaluation
from tasks.stages.evaluate.printout import describe_plan, diagnose, print_race
from tasks.stages.evaluate.racing import Race, Round, race
from tasks.stages.evaluate.runner import EpisodeRunner, Store
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.evaluate.sharded import choose_problems, measure_sharded
from tasks.stages.evaluate.transfer import measure_transfer

if TYPE_CHECKING:
    from tasks.measurement.statistics import Result, Success
    from tasks.tools.base import Environment

SETTINGS = EvaluateSections


class Confirmed(NamedTuple):
    """Episodes on `test` of the base model, the warm start and the best snapshot."""

    models: dict[str, Path]
    hashes: dict[str, str]
    on_test: dict[str, list[Trajectory]]
    greedy: dict[str, list[Trajectory]]


def run(settings: EvaluateSections, paths: Paths) -> None:
    inputs = read_inputs(settings, paths)
    tell(describe_plan(settings.evaluate, len(inputs.snapshots), len(inputs.select), inputs.test))
    with (
        atomic_folder(paths.stage("evaluate")) as folder,
        closing(load_environment(settings.environment)) as environment,
        closing(EpisodeRunner(environment, plays=settings.plays, resume=inputs.resume)) as runner,
    ):
        evaluation = measure(settings, paths, inputs, environment, runner, folder)
        for sentence in diagnose(evaluation["test"], evaluation["gain_over_warm_start"]):
            warn(f"warning: {sentence}")
        write_json(folder / "metrics.json", headline_metrics(evaluation))
        write_json(folder / "evaluation.json", evaluation)

    # After the results: if killed in between, the stage runs again and notes the same.
    note_evaluation(
        paths,
        test=content_hash(paths.split("test")),
        episodes=evaluation["contents"]["test_best.jsonl"],
        problem_ids=[problem.id for problem in inputs.test],
    )
    measured = content_hash(paths.stage("evaluate") / "evaluation.json")
    write_json(paths.artifacts / "timings" / "evaluate.json", {**runner.timings, "evaluation": measured})
    clear_resume("evaluate", paths)


def measure(
    settings: EvaluateSections,
    paths: Paths,
    inputs: Inputs,
    environment: Environment,
    runner: EpisodeRunner,
    folder: Path,
) -> dict[str, Any]:
    """Everything that evaluation.json says; the episodes behind it are stored in `folder`."""
    from tasks.stages.evaluate.scripted_baselines import measure_baselines

    test, confidence = inputs.test, settings.evaluate.confidence
    in_parts = choose_problems(environment, test, settings.evaluate.sharded)
    baselines = measure_baselines(environment, test, confidence=confidence)
    of_endpoint = measure_endpoint(settings, environment, test, inputs.resume)
    outcome = choose(inputs.snapshots, inputs.select, settings, runner)
    on_select = keep_selection(inputs.snapshots, inputs.select, runner, folder, confidence=confidence)
    print_race(outcome, on_select)

    confirmed = confirm(inputs.snapshots[outcome.winner], settings, paths, test, runner)
    models, on_test = confirmed.models, confirmed.on_test
    runner.close()  # what follows has engines of its own, and two might not fit on a device
    keep, resume = partial(store, folder), inputs.resume
    transfer = measure_transfer(settings, inputs.others, models, resume=resume, store=keep)
    reflexion = play_reflexion(settings, environment, test, models, on_test, paths, resume=resume, store=keep)
    sharded = measure_sharded(settings, in_parts, models, on_test, resume=resume, store=keep)
    refuse_altered(models, confirmed.hashes)
    for name in models:
        runner.store(test, "test", name, episodes_in(folder, f"test_{name}"))
    frontier = settings.evaluate.frontier
    if frontier:
        keep("test_frontier", of_endpoint)
    only_where_asked = {
        "baselines": baselines,
        "frontier": frontier and frontier_row(frontier, of_endpoint, on_test["best"], confidence=confidence),
        "also": transfer,
        "reflexion": reflexion,
        "sharded": sharded,
    }
    return {
        "best_snapshot": outcome.winner,
        "confidence": confidence,
        "sampling": settings.plays["test"].sampling.model_dump(include=set(DistributionSettings.model_fields)),
        "select": on_select,
        "racing": {"rounds": outcome.rounds, "dropped": outcome.dropped},
        **results_on_test(confirmed, test, runner, confidence=confidence),
        **identify_models(models, confirmed.hashes, inputs.parts),
        "contents": hash_episodes(folder / "trajectories"),
        "environment": inputs.drift.to_row(),
        **{name: row for name, row in only_where_asked.items() if row},
    }


def confirm(
    best: Path, settings: EvaluateSections, paths: Paths, test: list[Problem], runner: EpisodeRunner
) -> Confirmed:
    """Play the base model, the warm start and the best snapshot on `test`."""
    models = {"base": paths.base_model, "warm_start": paths.start_model, "best": best}
    hashes = hash_folders(models)
    runner.expect(models.values())

    def play(split: str) -> dict[str, list[Trajectory]]:
        return {name: runner.play(model, test, split, name) for name, model in models.items()}

    return Confirmed(models, hashes, play("test"), play("greedy") if settings.evaluate.greedy else {})


def results_on_test(
    confirmed: Confirmed, test: list[Problem], runner: EpisodeRunner, *, confidence: float
) -> dict[str, Any]:
    from tasks.measurement.statistics import paired_difference, summarise
    from tasks.measurement.tries import best_of_k

    def summaries(split: str, names: Iterable[str]) -> dict[str, Result]:
        return {name: summarise(runner.summaries(test, split, name), confidence=confidence) for name in names}

    best, warm_start = confirmed.on_test["best"], confirmed.on_test["warm_start"]
    return {
        "test": summaries("test", confirmed.on_test),
        "greedy": summaries("greedy", confirmed.greedy),
        "gain_over_warm_start": paired_difference(best, warm_start, confidence=confidence),
        "warm_start_best_of_k": best_of_k(warm_start, best, confidence=confidence),
    }


def choose(
    snapshots: Mapping[str, Path], select: list[Problem], settings: EvaluateSections, runner: EpisodeRunner
) -> Race:
    from tasks.core.progress import progress_bar
    from tasks.measurement.statistics import success_by_problem
    from tasks.rollouts.fault_log import JudgedTogether

    def play_round(block: Round) -> dict[str, Success]:
        of_how_many = f" {block.number} of {block.num_rounds}" if block.num_rounds > 1 else ""
        done = [runner.num_finished(block.problems, "select", snapshots[name]) for name in block.snapshots]
        runner.expect(snapshots[name] for name in block.snapshots)
        num_each = len(block.problems) * settings.evaluate.select_samples_per_problem
        total = len(block.snapshots) * num_each
        others = JudgedTogether(total)
        label = f"select{of_how_many}, {counted(len(block.snapshots), 'snapshot')}"
        with progress_bar(label, total=total, done=sum(done)) as bar:
            found = {}
            for name in block.snapshots:
                others.begin(num_each)
                played = runner.play(snapshots[name], block.problems, "select", name, bar=bar, others=others)
                others.end(played)
                found[name] = success_by_problem(played, lost_fail=True)
            bar.done = total  # a snapshot that is another one's copy plays nothing
            return found

    return race(list(snapshots), select, play_round, settings.evaluate.racing, seed=settings.seed)


def play_reflexion(
    settings: EvaluateSections,
    environment: Environment,
    test: list[Problem],
    models: Mapping[str, Path],
    on_test: Mapping[str, list[Trajectory]],
    paths: Paths,
    *,
    resume: Path,
    store: Store,
) -> dict[str, Any]:
    """The row of `evaluate.reflexion`; empty where it is null."""
    from tasks.stages.evaluate.reflexion import count_rl_episodes, measure_reflexion

    options = settings.evaluate.reflexion
    if options is None:
        return {}
    return measure_reflexion(
        settings,
        environment,
        test,
        model=models[options.policy],
        first=on_test[options.policy],
        best=on_test["best"],
        num_rl_episodes=count_rl_episodes(paths.stage("train") / "metrics.jsonl"),
        resume=resume,
        store=store,
    )


def keep_selection(
    snapshots: Iterable[str], select: list[Problem], runner: EpisodeRunner, folder: Path, *, confidence: float
) -> dict[str, Result]:
    """The result of each snapshot on the problems of select that it played; its episodes are stored in `folder`."""
    from tasks.measurement.statistics import summarise

    found = {}
    for name in snapshots:
        runner.store(select, "select", name, episodes_in(folder, f"select_{name}"))
        found[name] = summarise(runner.summaries(select, "select", name), confidence=confidence)
    return found


def store(folder: Path, name: str, trajectories: list[Trajectory]) -> None:
    write_jsonl(episodes_in(folder, name), (trajectory.to_row() for trajectory in trajectories))


def episodes_in(folder: Path, name: str) -> Path:
    return folder / "trajectories" / f"{name}.jsonl"


def headline_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that `dvc metrics diff` shows: success on test with its interval, and cost per episode."""
    test = evaluation["test"]
    success = {
        f"{name}_{key}": test[name][key]
        for name in ("warm_start", "best")
        for key in ("success_rate", "ci_low", "ci_high")
    }
    return {
        "num_test_problems": test["best"]["num_problems"],
        "base_success_rate": test["base"]["success_rate"],
        **success,
        "gain_over_warm_start": evaluation["gain_over_warm_start"]["difference"],
        "best_tokens_per_episode": test["best"]["mean_sampled_tokens"],
        "best_calls_per_episode": test["best"]["mean_calls"],
        "best_invalid_call_share": test["best"]["invalid_call_share"],
        **{f"also_{name}_gain": row["gain"]["difference"] for name, row in evaluation.get("also", {}).items()},
    }
