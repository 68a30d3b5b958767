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
from typing import TYPE_CHECKING, Any

from tasks.core.files import (
    atomic_folder,
    content_hash,
    file_hash,
    json_hash,
    numbered_folders,
    require,
    write_json,
    write_jsonl,
)
from tasks.core.records import Problem, Trajectory
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell, warn
from tasks.core.text import counted
from tasks.drift.pin import check_pin
from tasks.environments.catalog import load_environment
from tasks.rollouts.settings import DistributionSettings
from tasks.stages.evaluate.endpoint_baseline import frontier_row, measure_endpoint
from tasks.stages.evaluate.measurement_key import Parts, key_of, key_parts
from tasks.stages.evaluate.noted import note_evaluation
from tasks.stages.evaluate.printout import describe_plan, diagnose, print_race
from tasks.stages.evaluate.racing import Race, Round, race
from tasks.stages.evaluate.runner import EpisodeRunner, Store
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.evaluate.sharded import choose_problems, measure_sharded
from tasks.stages.evaluate.transfer import OtherProblems, measure_transfer, read_others

if TYPE_CHECKING:
    from tasks.measurement.statistics import Result, Success
    from tasks.tools.base import Environment

SETTINGS = EvaluateSections


def run(settings: EvaluateSections, paths: Paths) -> None:
    from tasks.measurement.statistics import paired_difference, summarise
    from tasks.measurement.tries import best_of_k
    from tasks.stages.evaluate.scripted_baselines import measure_baselines

    options, confidence = settings.evaluate, settings.evaluate.confidence
    snapshots = {folder.name: folder for folder in numbered_folders(require(paths.stage("train") / "snapshots"))}
    select, test = read_split(paths, "select"), read_split(paths, "test")
    others = read_elsewhere(settings, paths, snapshots.values())
    refuse_no_room_for_notes(settings, paths)
    drift = check_pin(settings.environment, paths, stage="evaluate")
    parts = key_parts(settings.plays["test"], paths, settings.environment, drift)
    # DVC does not watch packages, so the folder's name does: never resume episodes that other versions sampled.
    resume = resume_folder("evaluate", settings, paths) / json_hash(parts)[:16]
    tell(describe_plan(options, len(snapshots), len(select), test))
    with (
        atomic_folder(paths.stage("evaluate")) as folder,
        closing(load_environment(settings.environment)) as environment,
        closing(EpisodeRunner(environment, plays=settings.plays, resume=resume)) as runner,
    ):
        in_parts = choose_problems(environment, test, options.sharded)
        baselines = measure_baselines(environment, test, confidence=confidence)
        of_endpoint = measure_endpoint(settings, environment, test, resume)
        outcome = choose(snapshots, select, settings, runner)
        on_select = keep_selection(snapshots, select, runner, folder, confidence=confidence)
        print_race(outcome, on_select)

        models = {
            "base": paths.base_model,
            "warm_start": paths.start_model,
            "best": snapshots[outcome.winner],
        }
        hashes = hash_folders(models)
        runner.expect(models.values())
        on_test = {name: runner.play(model, test, "test", name) for name, model in models.items()}
        greedy = {name: runner.play(model, test, "greedy", name) for name, model in models.items() if options.greedy}
        runner.close()  # what follows has engines of its own, and two might not fit on a device
        keep = partial(store, folder)
        transfer = measure_transfer(settings, others, models, resume=resume, store=keep)
        reflexion = play_reflexion(settings, environment, test, models, on_test, paths, resume=resume, store=keep)
        sharded = measure_sharded(settings, in_parts, models, on_test, resume=resume, store=keep)
        refuse_altered(models, hashes)
        for name in models:
            runner.store(test, "test", name, episodes_in(folder, f"test_{name}"))
        if options.frontier:
            keep("test_frontier", of_endpoint)

        evaluation: dict[str, Any] = {
            "best_snapshot": outcome.winner,
            "confidence": confidence,
            "sampling": settings.plays["test"].sampling.model_dump(include=set(DistributionSettings.model_fields)),
            "select": on_select,
            "racing": {"rounds": outcome.rounds, "dropped": outcome.dropped},
            "test": {name: summarise(runner.summaries(test, "test", name), confidence=confidence) for name in on_test},
            "greedy": {
                name: summarise(runner.summaries(test, "greedy", name), confidence=confidence) for name in greedy
            },
            "gain_over_warm_start": paired_difference(on_test["best"], on_test["warm_start"], confidence=confidence),
            "warm_start_best_of_k": best_of_k(on_test["warm_start"], on_test["best"], confidence=confidence),
            **identify_models(models, hashes, parts),
            "contents": hash_episodes(folder / "trajectories"),
            "environment": drift.to_row(),
        }
        if baselines:
            evaluation["baselines"] = baselines
        if options.frontier is not None:
            evaluation["frontier"] = frontier_row(options.frontier, of_endpoint, on_test["best"], confidence=confidence)
        evaluation |= {**({"also": transfer} if transfer else {}), **({"reflexion": reflexion} if reflexion else {})}
        evaluation |= {"sharded": sharded} if sharded else {}
        for sentence in diagnose(evaluation["test"], evaluation["gain_over_warm_start"]):
            warn(f"warning: {sentence}")
        write_json(folder / "metrics.json", headline_metrics(evaluation))
        write_json(folder / "evaluation.json", evaluation)

    # After the results: if killed in between, the stage runs again and notes the same.
    note_evaluation(
        paths,
        test=content_hash(paths.split("test")),
        episodes=evaluation["contents"]["test_best.jsonl"],
        problem_ids=[problem.id for problem in test],
    )
    measured = content_hash(paths.stage("evaluate") / "evaluation.json")
    write_json(paths.artifacts / "timings" / "evaluate.json", {**runner.timings, "evaluation": measured})
    clear_resume("evaluate", paths)


def read_elsewhere(settings: EvaluateSections, paths: Paths, snapshots: Iterable[Path]) -> dict[str, OtherProblems]:
    """The problems of `evaluate.also`, checked while nothing has been played yet."""
    from tasks.chat.format import load_chat
    from tasks.models.folders import model_config

    if not settings.evaluate.also:
        return {}
    base = paths.base_model
    return read_others(settings, load_chat(base), model_config(base), snapshots)


def refuse_no_room_for_notes(settings: EvaluateSections, paths: Paths) -> None:
    """ValueError where `evaluate.reflexion` could not be played, while nothing has been played yet."""
    from tasks.chat.format import load_chat
    from tasks.models.folders import model_config
    from tasks.stages.evaluate.reflexion import tokens_with_notes

    if settings.evaluate.reflexion is not None:
        base = paths.base_model
        sampling = settings.plays["test"].sampling
        tokens_with_notes(settings.evaluate.reflexion, load_chat(base), model_config(base), sampling)


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


def hash_folders(models: Mapping[str, Path]) -> dict[str, str]:
    from tasks.models.folders import folder_hash

    return {name: folder_hash(model) for name, model in models.items()}


def refuse_altered(models: Mapping[str, Path], hashes: Mapping[str, str]) -> None:
    for name, found in hash_folders(models).items():
        if found != hashes[name]:
            raise ValueError(
                f"{models[name]}: its files changed while it was measured, so its episodes fit no one model. "
                f"Run `dvc repro evaluate` again."
            )


def identify_models(models: Mapping[str, Path], hashes: Mapping[str, str], parts: Parts) -> dict[str, Any]:
    from tasks.models.folders import weights_hash

    return {
        "weights": {name: weights_hash(model) for name, model in models.items()},
        "folders": dict(hashes),
        "measurement": {"parts": parts, "keys": {name: key_of(parts, model) for name, model in hashes.items()}},
    }


def hash_episodes(trajectories: Path) -> dict[str, str]:
    return {file.name: file_hash(file) for file in sorted(trajectories.glob("*.jsonl"))}


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
