"""train: GRPO from the warm start, with reward 1 for a solved problem and 0 otherwise unless `reward` adds parts.

Takes the train problems and the warm-started model; leaves a snapshot every `train.snapshot_interval` iterations, one
line of metrics an iteration, and learnt.json, which names the snapshots that are what the run started from. Each
snapshot says what it was trained on (`trained_on.py`). Where the baseline gate said `skip_rl`, the one snapshot is the
model it was given, and there are no metrics (infra/decisions/0014). The trainer is handed a `collect` callable, so it
never sees an environment. A run that was killed goes on from its last checkpoint and ends bitwise as if it never had
been; a run that collapses is stopped or rolled back by the sentinel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.files import atomic_folder, number_of, numbered_folders, read_json, write_json, write_jsonl
from tasks.core.records import Problem
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell, warn
from tasks.core.text import one_line
from tasks.drift.pin import check_pin
from tasks.measurement.learnt import LEARNT_FILE, learnt_row, passed_on_row, untrained_sentence, what_to_do
from tasks.stages.train.alarms import Alarm
from tasks.stages.train.settings import TrainSections

if TYPE_CHECKING:
    from tasks.stages.train.run import TrainingRun

Metrics = dict[str, Any]


SETTINGS = TrainSections


class CollapseAlarm(ValueError):
    """The sentinel stopped the run; `alarm` says why, `metrics` holds the rows up to it."""

    def __init__(self, message: str, alarm: Alarm, metrics: list[Metrics]):
        super().__init__(message)
        self.alarm, self.metrics = alarm, metrics


def run(settings: TrainSections, paths: Paths) -> None:
    from tasks.tracking.metrics import live_logger

    check_pin(settings.environment, paths, stage="train")
    with atomic_folder(paths.stage("train")) as folder:
        if read_json(paths.stage("assess") / "baseline.json")["gate"] == "skip_rl":
            pass_on(paths.stage("warm_start") / "model", folder)
            return
        rows = train_policy(
            settings,
            start=paths.stage("warm_start") / "model",
            problems=read_split(paths, "train"),
            output=folder,
            resume=resume_folder("train", settings, paths),
            alarms=paths.artifacts / "alarms" / "train",
            log=live_logger(os.environ),  # the flow hands over an MLflow run; by hand and under DVC alone there is none
        )
        tell_what_was_learnt(settings, folder, rows)
        write_what_was_seen(paths, folder)
    write_jsonl(paths.artifacts / "timings" / "train.jsonl", seconds_of(rows))
    clear_resume("train", paths)


def write_what_was_seen(paths: Paths, output: Path) -> None:
    """Note in each snapshot what it learnt from: train, what its start did, and select, on which it may be chosen."""
    from tasks.models.trained_on import TrainedOn, digests_of, read_trained_on, write_trained_on

    own = TrainedOn(digests_of(read_split(paths, "train")), chosen=digests_of(read_split(paths, "select")))
    known = read_trained_on(paths.stage("warm_start") / "model") | own
    for snapshot in numbered_folders(output / "snapshots"):
        write_trained_on(snapshot, known)


def seconds_of(rows: Sequence[Metrics]) -> list[Metrics]:
    """What took how long in each iteration, where an engine says so: times lie beside the results, never in them."""
    timed = [{name: value for name, value in row.items() if name.endswith("_seconds")} for row in rows]
    return [{"iteration": row["iteration"], **seconds} for row, seconds in zip(rows, timed, strict=True) if seconds]


def tell_what_was_learnt(settings: TrainSections, output: Path, rows: Sequence[Metrics]) -> None:
    """Note which snapshots are untrained; one line where all of them are."""
    snapshots = {folder.name: number_of(folder.name) for folder in numbered_folders(output / "snapshots")}
    row = learnt_row(
        rows,
        snapshots=snapshots,
        drops_zero_variance=settings.train.zero_variance_groups == "drop",
        limit=settings.sentinel.max_zero_variance_share,
    )
    write_json(output / LEARNT_FILE, row)
    if not row["is_trained"]:
        warn(f"warning: {untrained_sentence(row, [*snapshots][-1])} {what_to_do(row)}")


def pass_on(model: Path, output: Path) -> None:
    """A pointer to the model as the only snapshot, after 0 iterations, so that the graph keeps one shape."""
    from tasks.models.folders import write_pointer

    write_pointer(output / "snapshots" / "iteration-0000", str(model))
    write_json(output / LEARNT_FILE, passed_on_row("iteration-0000"))
    write_jsonl(output / "metrics.jsonl", [])
    tell("train: the baseline gate said skip_rl, so the model is passed on untrained")


def train_policy(
    settings: TrainSections,
    *,
    start: Path,
    problems: Sequence[Problem],
    output: Path,
    resume: Path,
    alarms: Path,
    log: Callable[[Metrics], None] | None = None,
) -> list[Metrics]:
    """Train from the model folder `start`; leaves output/snapshots and output/metrics.jsonl, and returns the metrics.

    `resume` holds checkpoints while the run is under way. Where the sentinel stops the run, the snapshots so far are
    in output too, `alarms` has the alarm with its trajectories, and CollapseAlarm is raised.
    """
    from tasks.core.progress import progress_bar
    from tasks.stages.train.run import TrainingRun

    training = TrainingRun(settings, start=start, problems=problems, resume=resume)
    try:
        for sentence in training.refused:
            warn(f"warning: {sentence}")
        if training.iteration:
            warn(f"going on after iteration {training.iteration}, from {resume}")
        if log is not None:
            for row in training.metrics:
                log(row)
        with progress_bar("train", total=settings.train.num_iterations, done=training.iteration) as bar:
            while not training.is_done:
                row, alarm = training.iterate()
                if alarm is not None:
                    _answer(alarm, training, alarms)
                bar.advance(_detail(row))
                if log is not None:
                    log(row)
    finally:
        try:
            training.hand_over(output)
        finally:
            _close(training)
    return training.metrics


def _close(training: TrainingRun) -> None:
    """What does not close is told of and costs nothing: the results are whole, or another error says why not."""
    try:
        training.close()
    except Exception as error:
        found = one_line(f"{type(error).__name__}: {error}")
        warn(f"warning: after training, not everything could be closed ({found}).")


def _answer(alarm: Alarm, training: TrainingRun, alarms: Path) -> None:
    """Keep the evidence; then roll back and say so, or stop the run where that is the policy or no longer helps."""
    place = training.keep_evidence(alarm, alarms)
    if training.can_roll_back():
        warn(f"warning: {training.roll_back(alarm)} The trajectories are in {place}.")
        return
    raise CollapseAlarm(f"{alarm.message} The trajectories are in {place}.", alarm, training.metrics)


def _detail(row: Metrics) -> str:
    return (
        f"success {row['success_rate']:.2f}  tokens {row['mean_sampled_tokens']:.0f}  "
        f"kl {row.get('kl') or 0.0:.3f}  signal {row['informative_group_share']:.2f}"
    )
