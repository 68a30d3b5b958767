"""Whom a challenger is compared with: the reigning champion on today's `test`, or before the first what it grew from.

Both sides have episodes of one key (`episodes.py`): where those that are kept were made under anything else than
today's, the model is measured again, with the seeds that `evaluate` used for the challenger, so that both meet the same
random numbers. Left out: the verdict (`promote/stage.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.stages.evaluate.results import refuse_other_files
from tasks.stages.promote.episodes import Conditions, Episodes, episodes_of_policy, episodes_of_version
from tasks.stages.promote.unseen import Unseen

if TYPE_CHECKING:
    from tasks.stages.promote.challenger import Challenger
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version


class Opponent(NamedTuple):
    """Whom the challenger is compared with: the champion, or before the first one what it grew from.

    `differing_fields` are those in which its environment was another; its episodes are of today's all the same.
    """

    name: str
    episodes: Episodes
    differing_fields: Sequence[str] = ()

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.episodes.trajectories

    def on(self, unseen: Unseen) -> Opponent:
        """As it was measured on the problems that are left."""
        return self._replace(episodes=self.episodes._replace(trajectories=unseen.keep(self.trajectories)))


def find_opponent(
    challenger: Challenger, champion: Version | None, registry: Registry, conditions: Conditions
) -> Opponent:
    """The champion on today's `test`, its kept episodes where they fit; or the baseline a first one must beat."""
    from tasks.tracking.lineage import differing_fields

    if champion is None:
        return baseline(challenger, conditions)
    fields = differing_fields(champion.tags, conditions.environment.describe())
    episodes = episodes_of_version(champion, registry, conditions)
    return Opponent(f"the champion, version {champion.version}", episodes, fields)


def baseline(challenger: Challenger, conditions: Conditions) -> Opponent:
    """The episodes of what a first champion must beat."""
    policy = baseline_policy(conditions.paths)
    stage, name = {"warm_start": ("warm_start", "model"), "base": ("assess", "base_model")}[policy]
    folder = conditions.paths.stage(stage) / name

    def unaltered() -> Path:
        refuse_other_files(folder, challenger.evaluation, policy)
        return folder

    model = str(challenger.evaluation["folders"][policy])
    episodes = episodes_of_policy(policy, model, unaltered, challenger.evaluation, conditions)
    return Opponent(f"the {policy.replace('_', ' ')}", episodes)


def baseline_policy(paths: Paths) -> str:
    """What a first champion must beat: the warm start, or the base where no warm start was needed."""
    is_pointer = (paths.stage("warm_start") / "model" / "pointer.json").exists()
    return "base" if is_pointer else "warm_start"
