"""warm_start: supervised fine-tuning on error-free expert episodes, where the baseline gate asks for it.

Reads the demonstrations and the base model. Writes `warm_start/model` (where the gate asks for none, a pointer to the
base, so that the graph keeps one shape) and metrics, one line per optimizer step.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.core.files import atomic_folder, read_json, read_records, write_jsonl
from tasks.core.records import Demonstration
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import warn
from tasks.stages.warm_start.settings import WarmStartSections

SETTINGS = WarmStartSections


def run(settings: WarmStartSections, paths: Paths) -> None:
    from tasks.models.folders import write_pointer

    base = paths.stage("assess") / "base_model"
    gate = read_json(paths.stage("assess") / "baseline.json")["gate"]
    with atomic_folder(paths.stage("warm_start")) as folder:
        metrics: list[dict[str, Any]] = []
        if gate == "warm_start":
            metrics = fine_tune(settings, paths, base, folder / "model")
            note_training_data(paths, base, folder / "model")
        else:
            write_pointer(folder / "model", str(base))
        write_jsonl(folder / "metrics.jsonl", metrics)
    clear_resume("warm_start", paths)


def fine_tune(settings: WarmStartSections, paths: Paths, base: Path, output: Path) -> list[dict[str, Any]]:
    """Train `base` into `output`, from the last checkpoint of a killed run if there is one; returns the metrics."""
    from tasks.chat.format import load_chat
    from tasks.core.progress import progress_bar
    from tasks.learning.sft.trainer import SupervisedTrainer
    from tasks.learning.shared.checkpoints import Checkpoints, seed_generators
    from tasks.models.folders import load_config, load_model, save_snapshot, stored_dtype
    from tasks.models.limits import check_trainable
    from tasks.stages.warm_start.rows import demonstration_rows

    params, chat = settings.warm_start, load_chat(base)
    rows = demonstration_rows(settings, paths, chat)
    longest = max(len(row.token_ids) for row in rows)
    check_trainable(load_config(base), packing=params.packing, max_tokens=longest, key="warm_start.packing")
    seed_generators(settings.seed)
    trainer = SupervisedTrainer(load_model(base, compute=settings.compute), rows, params, seed=settings.seed)
    checkpoints = Checkpoints(resume_folder("warm_start", settings, paths), unit="step")
    found, refused = checkpoints.load()
    for sentence in refused:
        warn(f"warning: {sentence}")
    metrics: list[dict[str, Any]] = []
    if found is not None:
        trainer.load(found.tensors, found.state["trainer"])
        metrics = found.state["metrics"]
        warn(f"continuing after step {len(metrics)}, from {checkpoints.folder}")
    with closing(checkpoints), progress_bar("warm start", total=params.num_steps, done=len(metrics)) as bar:
        while len(metrics) < params.num_steps:
            metrics.append(trainer.step())
            bar.advance(f"loss {metrics[-1]['loss']:.3f}")
            if len(metrics) % params.checkpoint_interval == 0:
                state = {"trainer": trainer.state(), "metrics": metrics}
                checkpoints.save(len(metrics), trainer.tensors(), state)
    save_snapshot(output, trainer.model, chat.tokenizer, dtype=stored_dtype(base))
    return metrics


def note_training_data(paths: Paths, base: Path, model: Path) -> None:
    """Write into the model's folder what it learnt from: the demonstrated problems, and what its base learnt from."""
    from tasks.models.trained_on import TrainedOn, digests_of, read_trained_on, write_trained_on

    shown = {item.problem_id for item in read_records(paths.stage("curate") / "demonstrations.jsonl", Demonstration)}
    problems = [problem for problem in read_split(paths, "train") if problem.id in shown]
    write_trained_on(model, read_trained_on(base) | TrainedOn(digests_of(problems)))
