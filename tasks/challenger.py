"""The challenger: the best snapshot as `evaluate` left it, and the refusal of one that is no longer what was measured.

Weights that changed since, or episodes of another version of the environment than today's, are refused whoever asks for
the promotion: the success on record would not be theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tasks.champion import all_trajectories, episodes_file
from tasks.pinning import Checked
from tasks.records import Trajectory
from tasks.settings import Paths
from tasks.storage import read_json, require
from tasks.unseen import Unseen


class Challenger(NamedTuple):
    """The best snapshot as `evaluate` measured it on `test`, its weights still the ones that were measured."""

    snapshot: str
    folder: Path
    weights: str
    evaluation: dict[str, Any]
    trajectories: list[Trajectory]
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
    def fingerprint(self) -> str:
        return self.trajectories[0].environment_fingerprint

    @property
    def pin(self) -> str:
        return str(self.evaluation["environment"]["pin"])


def read_challenger(paths: Paths, *, num_threads: int) -> Challenger:
    """The best snapshot, a LoRA adapter merged in. ValueError where its weights or episodes are not those on record."""
    from tasks.measurement.learnt import read_untrained
    from tasks.measurement.statistics import summarise
    from tasks.models import merged_snapshot, weights_hash

    evaluation = read_json(paths.stage("evaluate") / "evaluation.json")
    snapshot = evaluation["best_snapshot"]
    folder = require(paths.stage("train") / "snapshots" / snapshot)
    weights, measured = weights_hash(folder), evaluation["weights"]["best"]
    if weights != measured:
        raise ValueError(
            f"{folder}: its weights ({weights[:12]}) are not the ones evaluate measured ({measured[:12]}), so the "
            f"success on record is not theirs. Run `dvc repro evaluate`, then promote again."
        )
    folder = merged_snapshot(folder, paths.stage("promote") / "merged", num_threads=num_threads)
    trajectories = all_trajectories(episodes_file(paths, "best"))
    found = summarise(trajectories, confidence=0.95)["success_rate"]
    recorded = evaluation["test"]["best"]["success_rate"]
    if found != recorded:
        raise ValueError(
            f"{episodes_file(paths, 'best')}: its episodes succeed on {found:.1%}, and evaluation.json says "
            f"{recorded:.1%}, so one of them is not what evaluate left. Run `dvc repro evaluate`, then promote again."
        )
    untrained = read_untrained(paths.stage("train"), snapshot)
    return Challenger(snapshot, folder, weights_hash(folder), evaluation, trajectories, untrained)


def refuse_another_world(paths: Paths, challenger: Challenger, fingerprint: str, checked: Checked) -> None:
    """ValueError where `evaluate` measured in a world that described itself, or answered, otherwise than today's."""
    is_described_alike = all(item.environment_fingerprint == fingerprint for item in challenger.trajectories)
    if not is_described_alike or challenger.pin != checked.pin:
        raise ValueError(
            f"{episodes_file(paths, 'best')}: measured in another version of the environment than today's, so it says "
            f"nothing about today's. Run `dvc repro --force --single-item evaluate`, then promote again."
        )
