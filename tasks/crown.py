"""A decision carried out: the challenger registered with its lineage and the alias moved, one promotion at a time.

Who is to become champion is `promote.py`'s question; what a registry holds is `tracking/registry.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from tasks.pinning import accepted_changes
from tasks.settings import Paths, read_params
from tasks.storage import read_json
from tasks.tracking.connection import TrackingSettings

if TYPE_CHECKING:
    from tasks.environments.base import Environment
    from tasks.promote import Challenger, Decision
    from tasks.tracking.registry import Registry, Version

LOCK_SECONDS = 600  # another promotion may be measuring its champion


def settle(
    tracking: TrackingSettings,
    model: str,
    paths: Paths,
    challenger: Challenger,
    environment: Environment,
    decide: Callable[[Version | None, Registry], Decision],
) -> tuple[Decision, Version | None, Version | None]:
    """The decision, carried out, and the champion before and after; only one promotion at a time."""
    from filelock import FileLock, Timeout

    from tasks.tracking.registry import Registry

    lock = paths.artifacts / ".registry.lock"
    try:
        with FileLock(lock, timeout=LOCK_SECONDS):
            registry = Registry(tracking, model)
            before = registry.champion()
            decision = decide(before, registry)
            after = crown(paths, challenger, registry, environment) if decision.verdict == "promote" else before
            return decision, before, after
    except Timeout:
        raise ValueError(
            f"{lock}: another promotion has held it for {LOCK_SECONDS} s, and two at once could both become champion. "
            f"Wait for it, or end it, and run `python -m tasks promote` again."
        ) from None


def crown(paths: Paths, challenger: Challenger, registry: Registry, environment: Environment) -> Version:
    """Register the snapshot with its lineage and move the alias. Each step is safe to repeat after a crash."""
    from tasks.tracking.lineage import lineage_tags
    from tasks.tracking.metrics import RUN_ID_VARIABLE

    card = read_json(paths.stage("curate") / "card.json")
    tags = lineage_tags(
        params=read_params(),
        card=card,
        evaluation=challenger.evaluation,
        weights=challenger.weights,
        description=environment.describe(),
        drift=accepted_changes(paths),
    )
    run_id = os.environ.get(RUN_ID_VARIABLE) or None
    version = registry.register(challenger.folder, weights=challenger.weights, tags=tags, run_id=run_id)
    registry.make_champion(version)
    return version
