"""train: GRPO from the warm start. The reward is 1 for a solved problem and 0 otherwise, unless `reward` adds parts.

Writes a snapshot every `train.snapshot_interval` iterations, metrics.jsonl, curve.csv and learnt.json, which names the
snapshots that learnt nothing. Where the gate said `skip_rl`, the only snapshot is the warm-started model
(infra/decisions/0014). A killed run continues from its last checkpoint and ends bitwise the same,
unless it streams with slow tools, `batch_deadline_seconds` or `environment.pool` (infra/decisions/0070).
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.files import (
    atomic_folder,
    content_hash,
    number_of,
    numbered_folders,
    read_json,
    write_json,
    write_jsonl,
    write_text,
)
from tasks.core.records import Metrics, Problem
from tasks.core.resume import clear_resume, resume_folder
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell, warn
from tasks.core.text import one_line
from tasks.core.workspace import as_shell_sees
from tasks.drift.pin import check_pin
from tasks.measurement.learnt import LEARNT_FILE, START, learnt_row, skipped_row, untrained_sentence, what_to_do
from tasks.models.files import POINTER
from tasks.stages.train.alarms import Alarm
from tasks.stages.train.outlook import Baseline, expect, read_baseline, warning_of
from tasks.stages.train.settings import TrainSections
from tasks.stages.train.unearned import most_unearned

if TYPE_CHECKING:
    from tasks.learning.shared.ranks import Ranks
    from tasks.stages.train.run import TrainingRun

SETTINGS = TrainSections
MOST_STALE = 0.5  # of the tokens of a batch, before a warning
CURVE = (
    "iteration", "optimizer_steps", "success_rate", "mean_reward", "informative_group_share", "kl", "entropy",
    "clip_share", "mean_sampled_tokens", "mean_turns", "learning_rate",
)  # fmt: skip


class CollapseAlarm(ValueError):
    """The sentinel stopped the run; `metrics` are the rows up to the alarm."""

    def __init__(self, message: str, alarm: Alarm, metrics: list[Metrics]):
        super().__init__(message)
        self.alarm, self.metrics = alarm, metrics


def run(settings: TrainSections, paths: Paths, *, ranks: Ranks | None = None) -> None:
    """`ranks`: the processes that train, of which this is rank 0; None is this one alone."""
    from tasks.models.torch_setup import num_gpus
    from tasks.rollouts.settings import MORE_ROOM
    from tasks.stages.train.policy import refuse_cut
    from tasks.tracking.metrics import live_logger

    if ranks is not None:
        refuse_cut(settings, ranks.size, num_here=ranks.num_here, num_gpus=num_gpus(settings.compute))
    elif fault := settings.engine.own.crowd_fault(num_trainers=1, num_gpus=num_gpus(settings.compute)):
        raise ValueError(f"{fault}. {MORE_ROOM}")
    check_pin(settings.environment, paths, stage="train")
    start = paths.start_model
    with atomic_folder(paths.stage("train")) as folder:
        if read_json(paths.stage("assess") / "baseline.json")["gate"] == "skip_rl":
            skip_training(start, folder)
            clear_resume("train", paths)  # of an earlier gate
            return
        problems, baseline = read_split(paths, "train"), read_baseline(paths)
        tell_outlook(settings, problems, baseline)
        resume = resume_folder("train", settings, paths)
        try:
            rows = train_policy(
                settings,
                start=start,
                problems=problems,
                baseline=baseline,
                output=folder,
                resume=resume,
                alarms=paths.artifacts / "alarms" / "train",
                log=live_logger(os.environ),  # the flow sets an MLflow run; otherwise there is none
                ranks=ranks,
                timings=paths.artifacts / "timings",
            )
        except CollapseAlarm as stop:
            raise CollapseAlarm(f"{stop} {what_is_left(resume)}", stop.alarm, stop.metrics) from None
        note_learning(settings, folder, rows, has_warm_start=not (start / POINTER).exists())
        note_training_data(paths, folder)
    clear_resume("train", paths)


def follow(settings: TrainSections, paths: Paths, ranks: Ranks) -> None:
    """On every rank but 0, which has all but the weights: take part in its steps until it ends."""
    from tasks.stages.train.policy import follow_leader

    follow_leader(settings, paths.start_model, ranks)


def skip_training(model: Path, output: Path) -> None:
    """Write a pointer to the model as the only snapshot, so that the graph keeps one shape."""
    from tasks.models.folders import write_pointer

    write_pointer(output / "snapshots" / START, str(model))
    write_json(output / LEARNT_FILE, skipped_row())
    write_metrics(output, [])
    tell("train: the baseline gate said skip_rl, so the model is passed on untrained")


def tell_outlook(settings: TrainSections, problems: Sequence[Problem], baseline: Baseline | None) -> None:
    """What to expect, where the model that training starts from was played."""
    if baseline is None:
        return
    outlook = expect(settings.train, problems, baseline)
    tell(f"train: {outlook.sentence}")
    tell(f"train: {outlook.planned.sentence}")
    if sentence := warning_of(settings.train, outlook):
        warn(f"warning: {sentence}")


def train_policy(
    settings: TrainSections,
    *,
    start: Path,
    problems: Sequence[Problem],
    output: Path,
    resume: Path,
    alarms: Path,
    log: Callable[[Metrics], None] | None = None,
    baseline: Baseline | None = None,
    ranks: Ranks | None = None,
    timings: Path | None = None,
) -> list[Metrics]:
    """Train from the model folder `start`, of which `baseline` has episodes, into `output`; returns the metrics. Where
    the sentinel stops the run, output has the snapshots so far, `alarms` the alarm with its trajectories, and
    CollapseAlarm is raised; the stage then keeps what `resume` has. A whole run leaves its seconds in `timings`;
    idle.json names the metrics they are of.
    """
    from tasks.core.progress import progress_bar
    from tasks.stages.train.run import TrainingRun

    has_warned = False
    played = () if baseline is None else baseline.played
    training = TrainingRun(settings, start=start, problems=problems, resume=resume, baseline=played, ranks=ranks)
    if baseline is not None and settings.train.exploration is None:  # which plays otherwise from the first iteration on
        training.sentinel.start = {"overlong_share": baseline.overlong_share}
    try:
        for sentence in training.refused:
            warn(f"warning: {sentence}")
        if training.iteration:
            others = _in_words(training.sentinel.changed_limits)
            warn(f"continuing after iteration {training.iteration}, from {resume}{others}")
        if log is not None:
            for row in training.metrics:
                log(row)
        with progress_bar("train", total=settings.train.num_iterations, done=training.iteration) as bar:
            while not training.is_done:
                row, alarm = training.iterate()
                if alarm is not None:
                    answer_alarm(alarm, training, alarms)
                has_warned = has_warned or warn_where_stale(row)
                bar.advance(_progress(row))
                if log is not None:
                    log({**row, **training.stopwatch.idle(row["iteration"])})
        if timings is not None:
            write_timings(timings, training)
            idle = training.stopwatch.idle_in_all()
    finally:
        try:
            training.snapshots.export(output / "snapshots")
            write_metrics(output, training.metrics)
        finally:
            _close(training)
    if timings is not None and idle["iteration_seconds"]:  # else this process had nothing left to train
        write_json(timings / "idle.json", {**idle, "metrics": content_hash(output / "metrics.jsonl")})
    return training.metrics


def warn_where_stale(row: Metrics) -> bool:
    """Whether most tokens of a batch that streamed carry no loss; the metrics say it of each."""
    share: float = row.get("stale_token_share", 0.0)
    if share <= MOST_STALE:
        return False
    warn(
        f"warning: {share:.0%} of the tokens of iteration {row['iteration']} are older than train.max_staleness and "
        f"carry no loss, so little is learnt from them (stale_token_share in the metrics, for each iteration). Raise "
        f"train.max_staleness, or lower train.streaming.groups_under_way."
    )
    return True


def what_is_left(resume: Path) -> str:
    """A stage that fails leaves no out, so the snapshots are where the run goes on from."""
    goes_on = "goes on from there where only limits of the sentinel are changed, and else begins anew."
    if not any(number_of(folder.name) for folder in numbered_folders(resume / "snapshots")):
        return f"There is no snapshot yet; if a checkpoint is in {resume}, `python -m tasks train` {goes_on}"
    return (
        f"The snapshots so far are in {resume / 'snapshots'} until a run of train succeeds; `python -m tasks train` "
        f"{goes_on}"
    )


def answer_alarm(alarm: Alarm, training: TrainingRun, alarms: Path) -> None:
    """Keep the evidence, then roll back; or stop the run where the settings say so or no roll back is left."""
    place = alarms / f"iteration-{alarm.iteration:04d}"
    keep_evidence(alarm, training, place)
    if not training.can_roll_back():
        raise CollapseAlarm(f"{alarm.message} The trajectories are in {as_shell_sees(place)}.", alarm, training.metrics)
    warn(f"warning: {training.roll_back(alarm)} The trajectories are in {as_shell_sees(place)}.")


def keep_evidence(alarm: Alarm, training: TrainingRun, place: Path) -> None:
    groups = training.trainer.last_groups
    write_jsonl(place / "trajectories.jsonl", (item.to_row() for group in groups for item in group.trajectories))
    unearned = [asdict(episode) for episode in most_unearned(groups)]
    write_json(place / "alarm.json", asdict(alarm) | {"most_unearned": unearned, "metrics": training.metrics})


def _in_words(changed_limits: Mapping[str, Sequence[float | None]]) -> str:
    changes = [f"sentinel.{name} {now} (before {before})" for name, (before, now) in changed_limits.items()]
    return f", with {', '.join(changes)}" if changes else ""


def _close(training: TrainingRun) -> None:
    """Only warn about an error: the results are complete, or another error says why not."""
    try:
        training.close()
    except Exception as error:
        found = f"{type(error).__name__}: {one_line(error, limit=300)}"
        warn(f"warning: after training, not everything could be closed ({found}).")


def write_metrics(output: Path, rows: Sequence[Metrics]) -> None:
    """metrics.jsonl without times (the same seed gives the same file), and its curves for `dvc plots`."""
    rows = [{name: value for name, value in row.items() if not name.endswith("_seconds")} for row in rows]
    write_jsonl(output / "metrics.jsonl", rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, CURVE, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(output / "curve.csv", text.getvalue())


def write_timings(folder: Path, training: TrainingRun) -> None:
    """train.jsonl, a row per iteration, turns.jsonl, a row per episode, and engine.jsonl, a row per reply: what
    `plan --gpus` simulates from.
    """
    timings = training.timings()
    refreshed = {row["iteration"]: row for row in iteration_seconds(training.metrics)}
    timings["train"] = [{**refreshed.get(row["iteration"], {}), **row} for row in timings["train"]]
    for name, rows in timings.items():
        write_jsonl(folder / f"{name}.jsonl", rows)


def iteration_seconds(rows: Sequence[Metrics]) -> list[Metrics]:
    timed = [{name: value for name, value in row.items() if name.endswith("_seconds")} for row in rows]
    return [{"iteration": row["iteration"], **seconds} for row, seconds in zip(rows, timed, strict=True) if seconds]


def note_learning(settings: TrainSections, output: Path, rows: Sequence[Metrics], *, has_warm_start: bool) -> None:
    """Write learnt.json, which names the untrained snapshots; one warning where all of them are."""
    snapshots = {folder.name: number_of(folder.name) for folder in numbered_folders(output / "snapshots")}
    row = learnt_row(
        rows,
        snapshots=snapshots,
        drops_zero_variance=settings.train.zero_variance_groups == "drop",
        limit=settings.sentinel.max_zero_variance_share,
    )
    write_json(output / LEARNT_FILE, row)
    if not row["is_trained"]:
        warn(f"warning: {untrained_sentence(row, [*snapshots][-1])} {what_to_do(row, has_warm_start=has_warm_start)}")


def note_training_data(paths: Paths, output: Path) -> None:
    """Write into each snapshot what it learnt from: train, what its start learnt from, and select, which chooses it."""
    from tasks.models.trained_on import TrainedOn, digests_of, read_trained_on, write_trained_on

    own = TrainedOn(digests_of(read_split(paths, "train")), chosen=digests_of(read_split(paths, "select")))
    known = read_trained_on(paths.start_model) | own
    for snapshot in numbered_folders(output / "snapshots"):
        write_trained_on(snapshot, known)


def _progress(row: Metrics) -> str:
    if "success_rate" not in row:
        return "every episode began with replayed turns" if row["num_episodes"] else "every episode was lost to faults"
    kl = "" if row.get("kl") is None else f"kl {row['kl']:.3f}  "
    return (
        f"success {row['success_rate']:.2f}  tokens {row['mean_sampled_tokens']:.0f}  "
        f"{kl}signal {row['informative_group_share']:.2f}"
    )
