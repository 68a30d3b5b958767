"""The challenger: the best snapshot as `evaluate` left it, and the refusal of one that is no longer what was measured.

Files of the model that changed since, episodes of which a byte did, or episodes of another version of the environment
than today's, are refused whoever asks for the promotion: the success on record would not be theirs. Episodes that were
drawn otherwise than today (another torch, other engine settings) speak for it no longer, and it is measured again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import require
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.drift.pin import DriftCheck
from tasks.rollouts.settings import DistributionSettings
from tasks.stages.evaluate.measurement_key import Parts, key_parts
from tasks.stages.evaluate.results import AGAIN, episodes_file, evaluated_episodes, read_evaluation, refuse_other_files
from tasks.stages.promote.episodes import Conditions, Episodes, episodes_of_policy
from tasks.stages.promote.unseen import Unseen

if TYPE_CHECKING:
    from tasks.stages.promote.settings import PromoteSections
    from tasks.tools.base import Environment


class Challenger(NamedTuple):
    """The best snapshot as `evaluate` measured it on `test`, its files still the ones that were measured.

    `weights` and `files` are the hashes it is registered under: of its weights, and of its whole folder, after a LoRA
    adapter was merged. `episodes` is the file of its trajectories, `parts` what they were made under.
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
    untrained: str | None = None  # why it is no trained model, where it is not

    @property
    def result(self) -> dict[str, Any]:
        return dict(self.evaluation["test"]["best"])

    def on(self, unseen: Unseen, *, confidence: float) -> Challenger:
        """As it was measured on the problems that are left, where some are left out."""
        from tasks.measurement.statistics import summarise

        if not unseen.num_left_out:
            return self
        kept = unseen.keep(self.trajectories)
        test = {**self.evaluation["test"], "best": summarise(kept, confidence=confidence)}
        return self._replace(trajectories=kept, evaluation={**self.evaluation, "test": test})

    @property
    def pin(self) -> str:
        return str(self.evaluation["environment"]["pin"])


def read_challenger(paths: Paths, *, num_threads: int) -> Challenger:
    """The best snapshot, a LoRA adapter merged in. ValueError where its files or episodes are not those on record."""
    from tasks.measurement.learnt import read_untrained
    from tasks.measurement.statistics import summarise
    from tasks.models.folders import folder_hash, merged_snapshot, resolve_model, weights_hash

    evaluation = read_evaluation(paths)
    snapshot = evaluation["best_snapshot"]
    measured = require(paths.stage("train") / "snapshots" / snapshot)
    refuse_other_files(measured, evaluation, "best")
    folder = merged_snapshot(measured, paths.stage("promote") / "merged", num_threads=num_threads)
    if folder != resolve_model(measured):
        refuse_other_files(measured, evaluation, "best")  # nor while it was merged
    trajectories = evaluated_episodes(paths, evaluation, "best")
    found = summarise(trajectories, confidence=0.95)["success_rate"]
    recorded = evaluation["test"]["best"]["success_rate"]
    if found != recorded:
        raise ValueError(
            f"{episodes_file(paths, 'best')}: its episodes succeed on {found:.1%}, and evaluation.json says "
            f"{recorded:.1%}, so one of them is not what evaluate left. {AGAIN}"
        )
    return Challenger(
        snapshot,
        folder,
        weights_hash(folder),
        folder_hash(folder),
        evaluation,
        trajectories,
        episodes_file(paths, "best"),
        evaluation["measurement"]["parts"],
        [],
        read_untrained(paths.stage("train"), snapshot),
    )


def under_todays_key(challenger: Challenger, conditions: Conditions) -> Challenger:
    """The challenger with episodes of today's key: those of `evaluate`, or measured again where anything that decides
    tokens is another now.
    """
    from tasks.measurement.statistics import summarise

    evaluation = challenger.evaluation
    found = episodes_of_policy("best", challenger.files, lambda: challenger.folder, evaluation, conditions)
    if not found.differed_in:
        return challenger
    result = summarise(found.trajectories, confidence=evaluation["confidence"])
    return challenger._replace(
        evaluation={**evaluation, "test": {**evaluation["test"], "best": result}},
        trajectories=found.trajectories,
        episodes=found.file or challenger.episodes,
        parts=conditions.parts,
        measured_again_for=found.differed_in,
    )


def todays_conditions(
    settings: PromoteSections, paths: Paths, challenger: Challenger, environment: Environment, checked: DriftCheck
) -> Conditions:
    """What both sides are measured under: as `evaluate` measured the challenger, on today's machine and code."""
    play = settings.play(
        challenger.result["samples_per_problem"],
        drawn_from=DistributionSettings(**challenger.evaluation["sampling"]),
    )
    parts = key_parts(
        play,
        test=paths.split("test"),
        environment=settings.environment,
        fingerprint=checked.fingerprint,
        pin=checked.pin,
    )
    return Conditions(paths, environment, parts, play)


def measured_under(challenger: Challenger, other: Episodes | None = None) -> dict[str, Any]:
    """For decision.json: the parts of the key, the key of either side, and why one was measured again."""
    ours, parts = Episodes(challenger.files, challenger.trajectories, challenger.measured_again_for), challenger.parts
    return {"parts": parts, "challenger": ours.to_row(parts), "other": other.to_row(parts) if other else None}


def refuse_another_world(paths: Paths, challenger: Challenger, fingerprint: str, checked: DriftCheck) -> None:
    """ValueError where `evaluate` measured in a world that described itself, or answered, otherwise than today's."""
    is_described_alike = all(item.environment_fingerprint == fingerprint for item in challenger.trajectories)
    if not is_described_alike or challenger.pin != checked.pin:
        raise ValueError(
            f"{episodes_file(paths, 'best')}: measured in another version of the environment than today's, so it says "
            f"nothing about today's. Run `dvc repro --force --single-item evaluate`, then promote again."
        )
