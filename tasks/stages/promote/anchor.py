"""The anchor of success: which version it is, its episodes on today's problems, and what becomes of it.

As a rule the champion is the anchor itself, and nothing more is measured. Where it was promoted as cheaper, the anchor
is a version from before it (`tracking/history.py`), played as the champion is. Where that was deleted from the registry
the best that is left takes its place. Left out: what a challenger must show against it (`measurement/cost_checks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.core.records import Trajectory
from tasks.measurement.statistics import summarise
from tasks.stages.promote.checks.cost import Anchor
from tasks.stages.promote.policy import is_next_anchor

if TYPE_CHECKING:
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version

Play = Callable[["Version"], list[Trajectory]]  # a version's episodes on the problems that are compared on


@dataclass(frozen=True, slots=True)
class FoundAnchor:
    """The anchor and its version; `deleted` is the version that should be it and is gone from the registry."""

    anchor: Anchor
    version: int
    deleted: int | None

    @property
    def sentence(self) -> str | None:
        """What to say where it is not the one it should be."""
        if self.deleted is None:
            return None
        return (
            f"Version {self.deleted}, which success may not fall below, was deleted from the registry; of those left, "
            f"{self.anchor.name} is best and takes its place."
        )

    def to_row(self, challenger: list[Trajectory], *, alpha: float) -> dict[str, Any]:
        """Its part of decision.json; `is_next`: whether the challenger would be the anchor as champion."""
        success = summarise(self.anchor.trajectories, confidence=0.95)["success_rate"]
        return {
            "name": self.anchor.name,
            "version": self.version,
            "success_rate": success,
            "deleted": self.deleted,
            "is_next": is_next_anchor(challenger, self.anchor, alpha=alpha),
        }


def find_anchor(registry: Registry, champion: Version, as_played: Anchor, *, play: Play) -> FoundAnchor:
    """By the journal. `as_played` is the champion with its episodes; `play` is called where the anchor is another."""
    from tasks.tracking.history import anchors
    from tasks.tracking.journal import read_journal

    path, there_are = anchors(read_journal(registry).entries), registry.numbers()
    left = [number for number in path if number in there_are]
    deleted = path[-1] if path and path[-1] not in there_are else None
    reigning = FoundAnchor(as_played, champion.version, deleted)
    version = registry.version(left[-1]) if left else None
    if version is None or version.version == champion.version:
        return reigning
    found = FoundAnchor(Anchor(f"the anchor, version {version.version}", play(version)), version.version, deleted)
    # The deleted anchor was better than the one before it, and the champion almost as good as that.
    return max(reigning, found, key=_success) if deleted else found


def recorded_anchor(registry: Registry) -> dict[str, Any] | None:
    """Its part of decision.json where nothing could be measured: the anchor stays what it is."""
    from tasks.tracking.history import anchors
    from tasks.tracking.journal import read_journal

    path = anchors(read_journal(registry).entries)
    if not path:
        return None
    return {"name": f"version {path[-1]}", "version": path[-1], "success_rate": None, "deleted": None, "is_next": False}


def _success(found: FoundAnchor) -> float:
    return summarise(found.anchor.trajectories, confidence=0.95)["success_rate"]
