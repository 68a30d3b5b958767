"""evaluate: choose a snapshot on `select`, then confirm it, the warm start and the base on `test`.

Snapshots race on `select` (`racing.py`): the same problems with the same random numbers, clearly worse ones dropped
early, the best success alone goes on (ties: the earlier one). Only then does a model that is chosen touch `test`. The
world's own `baselines`, where it has any, stand beside them, and the model behind an endpoint that `evaluate.frontier`
names: yardsticks that nothing is decided by, played first, so that a wrong key shows before an hour of evaluation.

Every episode is kept as it ends, so a stage that was killed plays only what is missing. Seconds go to
artifacts/timings, since results must not hold any; that somebody looked at `test` is noted (`evaluate/looks.py`). Never
reads the registry: whether to promote is the next stage's question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
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
from tasks.core.terminal import tell
from tasks.drift.pin import Checked, check_pin
from tasks.environments.catalog import load_environment
from tasks.rollouts.settings import DistributionSettings
from tasks.stages.evaluate.endpoint_baseline import frontier_row, play_frontier
from tasks.stages.evaluate.looks import note_evaluation
from tasks.stages.evaluate.measurement_key import Parts, key_of, key_parts
from tasks.stages.evaluate.racing import Race, Round, block_ends, chance_of_losing_its_place, race
from tasks.stages.evaluate.runner import EpisodeRunner
from tasks.stages.evaluate.settings import EvaluateSections, EvaluateSettings

if TYPE_CHECKING:
    from rich.table import Table

    from tasks.measurement.statistics import Result, Success
    from tasks.tools.base import Environment


SETTINGS = EvaluateSections


def run(settings: EvaluateSections, paths: Paths) -> None:
    from tasks.measurement.statistics import paired_difference, summarise
    from tasks.stages.evaluate.scripted_baselines import measure_baselines

    options, confidence = settings.evaluate, settings.evaluate.confidence
    snapshots = {folder.name: folder for folder in numbered_folders(require(paths.stage("train") / "snapshots"))}
    select, test = read_split(paths, "select"), read_split(paths, "test")
    checked = check_pin(settings.environment, paths, stage="evaluate")
    parts = measured_under(settings, paths, checked)
    # Packages are no dep of the stage: episodes drawn by others than today's are not gone on with.
    resume = resume_folder("evaluate", settings, paths) / json_hash(parts)[:16]
    tell(what_can_be_seen(options, len(snapshots), len(select), test))
    with (
        atomic_folder(paths.stage("evaluate")) as folder,
        closing(load_environment(settings.environment)) as world,
        closing(EpisodeRunner(world, plays=settings.plays, resume=resume)) as player,
    ):
        baselines = measure_baselines(world, test, confidence=confidence)
        frontier = measure_frontier(settings, world, test, folder, resume)
        outcome = choose(snapshots, select, settings, player)
        on_select = keep_selection(outcome, select, player, folder, names=snapshots, confidence=confidence)
        models = {
            "base": paths.stage("assess") / "base_model",
            "warm_start": paths.stage("warm_start") / "model",
            "best": snapshots[outcome.winner],
        }
        folders = folder_hashes(models)
        on_test = {name: player.play(model, test, "test", name) for name, model in models.items()}
        refuse_altered(models, folders)
        for name, played in on_test.items():
            store(folder, f"test_{name}", played)
        evaluation: dict[str, Any] = {
            "best_snapshot": outcome.winner,
            "confidence": confidence,
            "sampling": settings.plays["test"].sampling.model_dump(include=set(DistributionSettings.model_fields)),
            "select": on_select,
            "racing": {"rounds": outcome.rounds, "dropped": outcome.dropped},
            "test": {name: summarise(played, confidence=confidence) for name, played in on_test.items()},
            "gain_over_warm_start": paired_difference(on_test["best"], on_test["warm_start"], confidence=confidence),
            **tied_to_models(models, folders, parts),
            "contents": contents(folder / "trajectories"),
            "environment": checked.to_row(),
        }
        if baselines:
            evaluation["baselines"] = baselines
        if options.frontier is not None:
            evaluation["frontier"] = frontier_row(options.frontier, frontier, on_test["best"], confidence=confidence)
        write_json(folder / "evaluation.json", evaluation)
    # After the results are there: killed in between, the stage is run again and notes the same.
    note_evaluation(
        paths,
        test=content_hash(paths.split("test")),
        episodes=evaluation["contents"]["test_best.jsonl"],
        problem_ids=[problem.id for problem in test],
    )
    measured = content_hash(paths.stage("evaluate") / "evaluation.json")
    write_json(paths.artifacts / "timings" / "evaluate.json", {**player.timings, "evaluation": measured})
    clear_resume("evaluate", paths)


def measure_frontier(
    settings: EvaluateSections, world: Environment, test: list[Problem], folder: Path, resume: Path
) -> list[Trajectory]:
    """The episodes on test of the model behind an endpoint, kept in `folder` too; none where params name no such."""
    options = settings.evaluate.frontier
    if options is None:
        return []
    played = play_frontier(
        options,
        world,
        test,
        max_turns=settings.sampling.max_turns,
        seed=settings.seed,
        finished=resume / "test_frontier.jsonl",
    )
    store(folder, "test_frontier", played)
    return played


def keep_selection(
    outcome: Race,
    select: list[Problem],
    player: EpisodeRunner,
    folder: Path,
    *,
    names: Iterable[str],
    confidence: float,
) -> dict[str, Result]:
    """Each snapshot's episodes on select stored in `folder` and summed up; the race is printed as a table."""
    from tasks.measurement.statistics import summarise

    on_select: dict[str, Result] = {}
    for name in names:
        played = player.played(select, "select", name)
        on_select[name] = summarise(played, confidence=confidence)
        store(folder, f"select_{name}", played)
    tell_the_race(outcome, on_select)
    return on_select


def measured_under(settings: EvaluateSections, paths: Paths, checked: Checked) -> Parts:
    """The key of what is measured on test here, but for the model."""
    return key_parts(
        settings.plays["test"],
        test=paths.split("test"),
        environment=settings.environment,
        fingerprint=checked.fingerprint,
        pin=checked.pin,
    )


def folder_hashes(models: Mapping[str, Path]) -> dict[str, str]:
    from tasks.models.folders import folder_hash

    return {name: folder_hash(model) for name, model in models.items()}


def refuse_altered(models: Mapping[str, Path], folders: Mapping[str, str]) -> None:
    """ValueError where a model is no longer the one whose episodes began."""
    for name, found in folder_hashes(models).items():
        if found != folders[name]:
            raise ValueError(
                f"{models[name]}: its files changed while it was measured, so its episodes are of no one model. "
                f"Run `dvc repro evaluate` again."
            )


def tied_to_models(models: Mapping[str, Path], folders: Mapping[str, str], parts: Parts) -> dict[str, Any]:
    """What ties the results to the models that were measured, and to what they were measured under."""
    from tasks.models.folders import weights_hash

    return {
        "weights": {name: weights_hash(model) for name, model in models.items()},
        "folders": dict(folders),
        "measurement": {"parts": parts, "keys": {name: key_of(parts, model) for name, model in folders.items()}},
    }


def contents(trajectories: Path) -> dict[str, str]:
    """SHA-256 of each file of episodes, by name."""
    return {file.name: file_hash(file) for file in sorted(trajectories.glob("*.jsonl"))}


def choose(
    snapshots: dict[str, Path], select: list[Problem], settings: EvaluateSections, player: EpisodeRunner
) -> Race:
    """The race among the snapshots, a bar a round."""
    from tasks.core.progress import progress_bar
    from tasks.measurement.statistics import success_by_problem

    def play_round(block: Round) -> dict[str, Success]:
        of_how_many = f" {block.number} of {block.num_rounds}" if block.num_rounds > 1 else ""
        done = [player.num_finished(block.problems, "select", name) for name in block.snapshots]
        total = len(block.snapshots) * len(block.problems) * settings.evaluate.select_samples_per_problem
        with progress_bar(f"select{of_how_many}, {len(block.snapshots)} snapshots", total=total, done=sum(done)) as bar:
            return {
                name: success_by_problem(player.play(snapshots[name], block.problems, "select", name, bar=bar))
                for name in block.snapshots
            }

    return race(list(snapshots), select, play_round, settings.evaluate.racing, seed=settings.seed)


def store(folder: Path, name: str, played: list[Trajectory]) -> None:
    write_jsonl(folder / "trajectories" / f"{name}.jsonl", (trajectory.to_row() for trajectory in played))


def what_can_be_seen(options: EvaluateSettings, num_snapshots: int, num_select: int, test: list[Problem]) -> str:
    """Said before anything is played: how much of it there will be, and the smallest gain it could show."""
    from tasks.measurement.power import minimum_detectable_difference

    def smallest(success_rate: float) -> float:
        return 100 * minimum_detectable_difference(
            num_problems=len(test),
            num_groups=num_groups,
            samples_per_problem=options.test_samples_per_problem,
            confidence=options.confidence,
            power=options.power,
            success_rate=success_rate,
        )

    num_groups = len({problem.split_group or problem.id for problem in test})
    ends = block_ends(num_select, options.racing)
    return (
        f"select: {num_snapshots} snapshots on {' → '.join(map(str, ends))} problems × "
        f"{options.select_samples_per_problem}{'' if options.racing else ' (no racing)'}\n"
        f"{errors_of_racing(options, num_snapshots, num_select)}"
        f"test: {len(test)} problems of {num_groups} groups × {options.test_samples_per_problem}; the smallest "
        f"difference found {options.power:.0%} of\n"
        f"      the time at {options.confidence:.0%} confidence is {smallest(0.5):.1f} points near 50% success, "
        f"{smallest(0.9):.1f} near 90%"
    )


def errors_of_racing(options: EvaluateSettings, num_snapshots: int, num_select: int) -> str:
    """A line on both ways in which racing may drop the truly best snapshot; empty where nothing can be dropped."""
    if options.racing is None or num_snapshots < 2 or len(block_ends(num_select, options.racing)) < 2:
        return ""

    def without_a_place(lead: float) -> float:
        assert options.racing is not None
        return chance_of_losing_its_place(
            options.racing,
            lead=lead,
            num_snapshots=num_snapshots,
            num_problems=num_select,
            samples=options.select_samples_per_problem,
            success_rate=0.9,
        )

    return (
        f"      racing drops the best as worse in at most {options.racing.error_rate:.0%}, for want of a\n"
        f"      place in {without_a_place(0.01):.0%} if it leads by 1 point near 90% success, in "
        f"{without_a_place(0.03):.0%} if by 3\n"
    )


def tell_the_race(outcome: Race, on_select: dict[str, Result]) -> None:
    """The snapshots as a table: success where they were measured, and what became of them."""
    from tasks.core.console import SafeConsole

    SafeConsole().print(race_table(outcome, on_select))


def race_table(outcome: Race, on_select: dict[str, Result]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for number, column in enumerate(("Snapshot", "success", "interval", "problems", "race")):
        table.add_column(column, justify="left" if number in (0, 4) else "right", no_wrap=True)
    for name, result in on_select.items():
        rate, low, high = (f"{100 * result[key]:.1f}" for key in ("success_rate", "ci_low", "ci_high"))
        fate = "best" if name == outcome.winner else ""
        if why := outcome.dropped.get(name):
            reason = why["reason"].replace("_", " ")
            fate = f"{reason} in round {why['round']}, −{100 * why['behind']:.1f} points"
        style = "bold green" if name == outcome.winner else "dim" if name in outcome.dropped else None
        table.add_row(name, f"{rate}%", f"{low}–{high}", str(result["num_problems"]), fate, style=style)
    return table
