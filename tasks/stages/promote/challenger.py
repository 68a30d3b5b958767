"""The challenger: the best snapshot as `evaluate` measured it.

Refused, even under --force, where its files, its episodes or the environment's version changed since: the recorded
success would not be its own. Where only conditions differ (another torch or engine settings) it is measured again.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import require
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.drift.pin import DriftCheck
from tasks.measurement.statistics import success_rate, summarise
from tasks.models.settings import ComputeSettings
from tasks.rollouts.settings import DistributionSettings, PlaySettings
from tasks.stages.evaluate.measurement_key import Parts
from tasks.stages.evaluate.results import AGAIN, evaluated_episodes, read_evaluation, refuse_other_files
from tasks.stages.promote.episodes import Conditions, Episodes, KeptEpisodes, find_episodes
from tasks.stages.promote.unseen import Unseen

if TYPE_CHECKING:
    from tasks.stages.promote.settings import PromoteSections


class Challenger(NamedTuple):
    """The best snapshot as `evaluate` measured it on `test`; its files are verified.

    `weights` and `files` are the hashes it is registered under: of its weights, and of its whole folder, after a LoRA
    adapter was merged. `episodes` is the file of its trajectories, `parts` their measurement key.
    """

    snapshot: str
    folder: Path
    weights: str
    files: str
    evaluation: dict[str, Any]
    trajectories: list[Trajectory]
    episodes: Path
    parts: Parts
    measured_again_for: list[str]
    untrained: str | None = None  # why it is no trained model; None if it is one
    by_heart: str | None = None  # that it knows its training's problems only; None if it does not

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.evaluation["test"]["best"])

    def measured_as(self, trajectories: list[Trajectory], *, confidence: float) -> Challenger:
        test = {**self.evaluation["test"], "best": summarise(trajectories, confidence=confidence)}
        return self._replace(trajectories=trajectories, evaluation={**self.evaluation, "test": test})

    def on(self, unseen: Unseen, *, confidence: float) -> Challenger:
        """Restricted to the unseen problems, where some are left out."""
        if not unseen.num_left_out:
            return self
        return self.measured_as(unseen.keep(self.trajectories), confidence=confidence)


def merged_folder(paths: Paths) -> Path:
    """Where a challenger's adapter is merged; it goes with the stage, since the registry has the files by then."""
    return paths.stage("promote") / "merged"


def read_challenger(paths: Paths, *, compute: ComputeSettings) -> Challenger:
    """The best snapshot, a LoRA adapter merged in. ValueError where its files or episodes are not those on record."""
    from tasks.measurement.learnt import by_heart_sentence, read_untrained
    from tasks.models.folders import folder_hash, merged_snapshot, resolve_model, weights_hash
    from tasks.report.results import read_training
    from tasks.tracking.model_files import protect_weights

    evaluation = read_evaluation(paths)
    snapshot = evaluation["best_snapshot"]
    measured = require(paths.stage("train") / "snapshots" / snapshot)
    refuse_other_files(measured, evaluation, "best")
    folder = merged_snapshot(measured, merged_folder(paths), compute=compute)
    if folder != resolve_model(measured):
        protect_weights(folder)
        refuse_other_files(measured, evaluation, "best")  # nor while it was merged
    trajectories = evaluated_episodes(paths, evaluation, "best")
    _refuse_other_result(paths, trajectories, evaluation)
    return Challenger(
        snapshot=snapshot,
        folder=folder,
        weights=weights_hash(folder),
        files=folder_hash(folder),
        evaluation=evaluation,
        trajectories=trajectories,
        episodes=paths.test_episodes("best"),
        parts=evaluation["measurement"]["parts"],
        measured_again_for=[],
        untrained=read_untrained(paths.stage("train"), snapshot),
        by_heart=by_heart_sentence(read_training(paths), evaluation),
    )


def _refuse_other_result(paths: Paths, trajectories: list[Trajectory], evaluation: dict[str, Any]) -> None:
    found = success_rate(trajectories)
    recorded = evaluation["test"]["best"]["success_rate"]
    if found != recorded:
        raise ValueError(
            f"{paths.test_episodes('best')}: its episodes succeed on {found:.1%}, and evaluation.json says "
            f"{recorded:.1%}, so one of them is not what evaluate left. {AGAIN}"
        )


def refuse_another_environment(paths: Paths, challenger: Challenger, fingerprint: str, drift: DriftCheck) -> None:
    """ValueError where the environment's description or answers differ from those that `evaluate` measured."""
    is_described_alike = all(item.environment_fingerprint == fingerprint for item in challenger.trajectories)
    if not is_described_alike or challenger.evaluation["environment"]["pin"] != drift.pin:
        raise ValueError(
            f"{paths.test_episodes('best')}: measured in another version of the environment than today's, so its "
            f"recorded success is not of today's. Run `dvc repro --force --single-item evaluate`, then promote again."
        )


def todays_play(settings: PromoteSections, challenger: Challenger) -> PlaySettings:
    """How both sides are played: as `evaluate` played the challenger, with today's settings."""
    distribution = DistributionSettings(**challenger.evaluation["sampling"])
    return settings.play(challenger.result["samples_per_problem"], drawn_from=distribution)


def measure_challenger(challenger: Challenger, conditions: Conditions) -> Challenger:
    """The challenger with episodes of today's key: those of `evaluate`, or new ones where the key differs."""
    kept = KeptEpisodes(challenger.parts, lambda: challenger.trajectories)
    found = find_episodes(
        challenger.snapshot, challenger.files, conditions, kept, lambda: nullcontext(challenger.folder)
    )
    if not found.differed_in:
        return challenger
    again = challenger.measured_as(found.trajectories, confidence=challenger.evaluation["confidence"])
    return again._replace(
        episodes=found.file or challenger.episodes, parts=conditions.parts, measured_again_for=found.differed_in
    )


def measurement_row(challenger: Challenger, other: Episodes | None = None) -> dict[str, Any]:
    ours, parts = Episodes(challenger.files, challenger.trajectories, challenger.measured_again_for), challenger.parts
    return {"parts": parts, "challenger": ours.to_row(parts), "other": other.to_row(parts) if other else None}
