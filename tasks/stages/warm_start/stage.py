"""warm_start: supervised fine-tuning on error-free expert episodes, where the baseline gate asks for it.

Reads the demonstrations and the base model. Writes `warm_start/model` (where the gate asks for none, a pointer to the
base, so that the graph keeps one shape), metrics, one line per optimizer step, and attempts.json: what each attempt
came to (`attempts.py`). trajectories.jsonl has the episodes by which `warm_start.stop` judged the model that is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import atomic_folder, read_json, read_records, write_json, write_jsonl
from tasks.core.records import Demonstration
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.stages.warm_start.settings import WarmStartSections

if TYPE_CHECKING:
    from tasks.learning.shared.ranks import Ranks
    from tasks.stages.warm_start.run import WarmStartRun

SETTINGS = WarmStartSections


def run(settings: WarmStartSections, paths: Paths, *, ranks: Ranks | None = None) -> None:
    """`ranks`: the processes that train, of which this is rank 0; None is this one alone."""
    from tasks.models.folders import write_pointer

    base = paths.base_model
    gate = read_json(paths.stage("assess") / "baseline.json")["gate"]
    with atomic_folder(paths.stage("warm_start")) as folder:
        metrics: list[dict[str, Any]] = []
        attempts: list[dict[str, Any]] = []
        if gate == "warm_start":
            done = fine_tune(settings, paths, base, folder / "model", ranks=ranks)
            metrics, attempts = done.metrics, done.attempts()
            write_jsonl(folder / "trajectories.jsonl", (trajectory.to_row() for trajectory in done.played()))
            note_training_data(settings, paths, base, folder / "model")
        else:
            write_pointer(folder / "model", str(base))
        write_jsonl(folder / "metrics.jsonl", metrics)
        write_json(folder / "attempts.json", attempts)
    clear_resume("warm_start", paths)


def follow(settings: WarmStartSections, paths: Paths, ranks: Ranks) -> None:
    """On every rank but 0: take part in its steps until it ends."""
    from tasks.stages.warm_start.policy import follow_leader

    follow_leader(settings, ranks)


def fine_tune(
    settings: WarmStartSections, paths: Paths, base: Path, output: Path, *, ranks: Ranks | None = None
) -> WarmStartRun:
    """Train `base` into `output`, from the last checkpoint of a killed run if there is one."""
    from tasks.stages.warm_start.run import WarmStartRun

    resume = resume_folder("warm_start", settings, paths)
    run = WarmStartRun(settings, paths, base=base, resume=resume, ranks=ranks)
    run.train(output)
    return run


def note_training_data(settings: WarmStartSections, paths: Paths, base: Path, model: Path) -> None:
    """Write into the model's folder what it learnt from: the demonstrated problems, what its base learnt from, and the
    problems by whose success the attempt was chosen.
    """
    from tasks.models.trained_on import TrainedOn, digests_of, read_trained_on, write_trained_on
    from tasks.stages.warm_start.success import checked_problems

    shown = {item.problem_id for item in read_records(paths.stage("curate") / "demonstrations.jsonl", Demonstration)}
    problems = [problem for problem in read_split(paths, "train") if problem.id in shown]
    stop = settings.warm_start.stop
    chosen = checked_problems(paths, stop.num_problems) if stop else []
    write_trained_on(model, read_trained_on(base) | TrainedOn(digests_of(problems), chosen=digests_of(chosen)))
