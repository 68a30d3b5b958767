"""How the reigning champion does on today's `test`: stored trajectories where they fit exactly, else measured now.

Trajectories are a function of the weights, the problems, the world, and the settings of sampling; a key over all of
these tells whether stored ones still speak for the champion. Measuring uses the same seeds as `evaluate` used for the
challenger, so that both meet the same random numbers. Kept in artifacts/promote; left out: the verdict (`promote.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.problems import read_split
from tasks.records import Trajectory
from tasks.rollouts.options import EngineSettings, SamplingSettings
from tasks.settings import Paths
from tasks.storage import content_hash, json_hash, read_json, read_jsonl, write_json, write_jsonl

if TYPE_CHECKING:
    from tasks.environments.base import Environment
    from tasks.tracking.registry import Registry, Version


def measure_champion(
    champion: Version,
    registry: Registry,
    environment: Environment,
    paths: Paths,
    *,
    engine: EngineSettings,
    sampling: SamplingSettings,
    seed: int,
    samples_per_problem: int,
    num_threads: int,
) -> list[Trajectory]:
    """Play the test problems with the champion's registered weights, as `evaluate` did with the challenger's."""
    from tasks.models import weights_hash
    from tasks.rollouts.collect import sample_episodes

    folder = registry.download(champion, paths.stage("promote") / "champion")
    try:
        if weights_hash(folder) != champion.weights:
            raise ValueError(
                f"{champion.model} version {champion.version}: its stored weights are not those that were registered, "
                f"so they show nothing about it. Restore {registry.settings.artifact_location} from a backup."
            )
        return sample_episodes(
            folder,
            environment,
            read_split(paths, "test"),
            engine=engine,
            sampling=sampling,
            seed=seed,
            stage="test",
            samples_per_problem=samples_per_problem,
            num_threads=num_threads,
            label="champion on test",
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measurement_key(paths: Paths, *, weights: str, fingerprint: str, pin: str, settings: Mapping[str, Any]) -> str:
    """Hash of everything test trajectories depend on; equal keys mean equal trajectories.

    `fingerprint` is of what the environment says of itself, `pin` also of how it answers (`pinning.py`).
    """
    parts = {"weights": weights, "test": content_hash(paths.split("test")), "settings": dict(settings)}
    return json_hash({**parts, "fingerprint": fingerprint, "pin": pin})


def stored_trajectories(paths: Paths, key: str) -> list[Trajectory] | None:
    """promote/trajectories.jsonl, if trajectories.json says it was made under `key` and its bytes are unchanged."""
    file, note = _storage(paths)
    if not (file.exists() and note.exists()) or read_json(note) != {"key": key, "content": content_hash(file)}:
        return None
    return read_trajectories(file)


def store_trajectories(paths: Paths, key: str, trajectories: list[Trajectory]) -> None:
    """The note is written last and holds the file's hash: killed in between, it fits neither and is ignored."""
    file, note = _storage(paths)
    write_jsonl(file, (item.to_row() for item in trajectories))
    write_json(note, {"key": key, "content": content_hash(file)})


def read_trajectories(path: Path) -> list[Trajectory]:
    return [Trajectory.from_row(row) for _, row in read_jsonl(path)]


def _storage(paths: Paths) -> tuple[Path, Path]:
    folder = paths.stage("promote")
    return folder / "trajectories.jsonl", folder / "trajectories.json"
