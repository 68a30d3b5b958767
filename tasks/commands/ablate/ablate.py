"""ablate: train variants of the policy that differ in one choice each, and compare the results.

Starts from the curated problems and the warm-started model. The last snapshot of each variant (`variants.py`) plays
`select` with the same random numbers. A killed run continues from its last checkpoint, a finished one is never
repeated, and a run that the sentinel stops is a result.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.commands.ablate.table import WARM_START, VariantRun, compare_variants, markdown, print_ablation
from tasks.commands.ablate.variants import Variant, read_variants
from tasks.commands.profile import difference, merge_values
from tasks.commands.select_play import play_select, refuse_drift
from tasks.core.files import (
    atomic_folder,
    content_hash,
    is_page_of_code,
    json_hash,
    numbered_folders,
    read_json,
    read_jsonl,
    require,
    write_json,
    write_jsonl,
    write_text,
)
from tasks.core.provenance import code_hashes
from tasks.core.records import Problem, Trajectory
from tasks.core.resume import resume_root
from tasks.core.settings import Paths, load, load_paths, read_params
from tasks.core.splits import read_split
from tasks.core.targets import remove_leftovers
from tasks.core.terminal import warn
from tasks.core.text import first_few
from tasks.drift.pin import PIN_FILE, read_accepted
from tasks.pipeline.order import check_params, prepare_process
from tasks.pipeline.run_lock import only_run
from tasks.rewards.stored import read_trajectories
from tasks.stages.evaluate.measurement_key import packages_of_episodes
from tasks.stages.evaluate.settings import EvaluateSections
from tasks.stages.train.settings import TrainSections
from tasks.stages.train.stage import CollapseAlarm, train_policy

MAX_NAMED = 6
Train = Callable[..., list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Run:
    """One variant with one training seed. `folder` gets inputs.json, train/ and select.jsonl, each whole or not at all;
    `resume` is named by the inputs, so that a run never continues from a checkpoint of other settings or code.
    """

    variant: Variant
    settings: TrainSections
    inputs: dict[str, Any]
    folder: Path
    resume: Path

    @property
    def trained(self) -> Path:
        return self.folder / "train"

    @property
    def played(self) -> Path:
        return self.folder / "select.jsonl"

    @property
    def last_snapshot(self) -> Path | None:
        return next(reversed(_snapshots(self.trained)), None)


Measure = Callable[[Run, Path, list[Problem], EvaluateSections], list[Trajectory]]


def run_ablation(*, only: Sequence[str], num_seeds: int, num_iterations: int | None) -> None:
    params = read_params()
    check_params(params)
    prepare_process(params)
    paths = load_paths(params)
    with only_run(paths.artifacts):
        results = ablate(params, paths, only=only, num_seeds=num_seeds, num_iterations=num_iterations)
    from tasks.core.console import SafeConsole

    folder = paths.stage("ablation")
    places = {"table": folder / "table.md", "figure": folder / "ablation.png", "results": folder / "results.json"}
    print_ablation(results, places, SafeConsole())


def ablate(
    params: dict[str, Any],
    paths: Paths,
    *,
    only: Sequence[str] = (),
    num_seeds: int = 1,
    num_iterations: int | None = None,
    train: Train = train_policy,
    measure: Measure | None = None,
) -> dict[str, Any]:
    """Run the variants in `only` (none: all); returns the content of results.json, which has these runs alone.

    ValueError, before any training, where a stage's artifacts are missing, a variant changes nothing, or a finished run
    had other settings, data or code.
    """
    if num_iterations is not None:
        params = merge_values(params, {"train": {"num_iterations": num_iterations}})
    variants, settings = read_variants(params, only), load(EvaluateSections, params)
    refuse_drift(settings.environment, paths, what="ablate: its results")
    problems = {split: read_split(paths, split) for split in ("train", "select")}
    start = require(paths.start_model)
    runs = plan_runs(variants, params, paths, num_seeds=num_seeds)
    for number, run in enumerate(runs, start=1):
        title = f"{number} of {len(runs)}: {run.variant.name}, seed {run.settings.seed}"
        if run.played.exists():
            warn(f"{title}: kept from before")
            continue
        warn("; ".join([title, *run.variant.changes]))
        train_run(run, start, problems["train"], train)
        played = (measure or play)(run, run.last_snapshot or start, problems["select"], settings)
        write_jsonl(run.played, (trajectory.to_row() for trajectory in played))
        forget_state(run)
        write_results(runs, variants, settings, paths)
    return write_results(runs, variants, settings, paths)


def plan_runs(variants: list[Variant], params: dict[str, Any], paths: Paths, *, num_seeds: int) -> list[Run]:
    """Seed by seed, so that each round is a complete comparison."""
    data = {name: content_hash(paths.split(name)) for name in ("train", "select")}
    data["warm_start"] = content_hash(paths.start_model)
    data["environment"] = content_hash(paths.stage("curate") / PIN_FILE)
    data["accepted_drift"] = json_hash([accepted["today"] for accepted in read_accepted(paths)])
    measuring = params["evaluate"]
    played = {"seed": params["seed"], "samples": measuring["select_samples_per_problem"]}
    played["sampling"] = measuring["sampling"]
    runs = []
    for seed in range(params["seed"], params["seed"] + num_seeds):
        for variant in variants:
            folder = paths.stage("ablation") / f"{variant.name}-{seed}"
            settings = variant.settings.model_copy(update={"seed": seed})
            chosen = settings.model_dump(mode="json")
            inputs = {"settings": chosen, "data": data, "select": played, **code_of(settings, {**params, **chosen})}
            resume = resume_root("ablate", paths) / folder.name / json_hash(inputs)[:16]
            runs.append(Run(variant, settings, inputs, folder, resume))
    refuse_other_inputs(runs)
    return runs


def code_of(settings: TrainSections, params: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The code and the packages that train and evaluate watch, with the settings of a run."""
    code = {file: found for stage in ("train", "evaluate") for file, found in code_hashes(stage, params).items()}
    further = {folder: content_hash(Path(folder), ignore=is_page_of_code) for folder in settings.unwatched_folders()}
    return {"code": code | further, "packages": packages_of_episodes(settings.engine)}


def refuse_other_inputs(runs: list[Run]) -> None:
    """Runs with other settings, data or code cannot be compared with these, and cost too much to overwrite."""
    trained = [run for run in runs if run.trained.exists()]
    changes = {run.folder: difference(read_json(run.folder / "inputs.json"), run.inputs) for run in trained}
    changed = [folder for folder in changes if changes[folder]]
    if changed:
        told = first_few([line.strip() for line in changes[changed[0]]], MAX_NAMED, by="; ")
        raise ValueError(
            f"{changed[0]}: was made from other settings, data or code ({told}), so it cannot be compared in one "
            f"table. Move {', '.join(map(str, changed))} away or delete {'it' if len(changed) == 1 else 'them'}, then "
            f"run again; other runs are kept."
        )


def train_run(run: Run, start: Path, problems: list[Problem], train: Train) -> None:
    """Train the run unless that is done. An alarm that stops it is recorded; only the last snapshot is kept."""
    remove_leftovers(run.folder)
    write_json(run.folder / "inputs.json", run.inputs)
    if not run.trained.exists():
        with atomic_folder(run.trained) as output:
            alarm = None
            try:
                alarms = run.folder / "alarms"
                train(run.settings, start=start, problems=problems, output=output, resume=run.resume, alarms=alarms)
            except CollapseAlarm as collapse:
                found = collapse.alarm
                reason = found.message.removeprefix(f"iteration {found.iteration}: ")
                alarm = {"iteration": found.iteration, "signal": found.signal, "reason": reason}
            write_json(output / "alarm.json", alarm)
            for snapshot in _snapshots(output)[:-1]:
                shutil.rmtree(snapshot)
        forget_state(run)


def forget_state(run: Run) -> None:
    """What a killed training, and later a killed measurement, goes on from."""
    shutil.rmtree(run.resume.parent, ignore_errors=True)


def _snapshots(folder: Path) -> list[Path]:
    return numbered_folders(folder / "snapshots")


def play(run: Run, model: Path, problems: list[Problem], settings: EvaluateSections) -> list[Trajectory]:
    """Episodes on `select`, with the random numbers of params.yaml's seed whatever the training seed."""
    played, name = settings.plays["select"], run.variant.name
    return play_select(model, problems, played, settings.environment, stream="select", name=name, resume=run.resume)


def write_results(runs: list[Run], variants: list[Variant], settings: EvaluateSections, paths: Paths) -> dict[str, Any]:
    from tasks.commands.ablate.figure import ablation_figure

    finished = [(run.variant, read_run(run)) for run in runs if run.played.exists()]
    of_variant = {v: played for v in variants if (played := [run for other, run in finished if other is v])}
    results = compare_variants(of_variant, confidence=settings.evaluate.confidence)
    folder = paths.stage("ablation")
    write_json(folder / "results.json", results)
    write_text(folder / "table.md", markdown(results))
    training = {variant.name: [run.training for run in played] for variant, played in of_variant.items()}
    ablation_figure(results, training, paths, folder / "ablation.png")
    return results


def read_run(run: Run) -> VariantRun:
    return VariantRun(
        seed=run.settings.seed,
        training=[row for _, row in read_jsonl(run.trained / "metrics.jsonl")],
        alarm=read_json(run.trained / "alarm.json"),
        snapshot=run.last_snapshot.name if run.last_snapshot else WARM_START,
        trajectories=[trajectory for _, trajectory in read_trajectories(run.played)],
    )
