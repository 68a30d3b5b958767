"""Whom a challenger is compared with: the reigning champion on today's `test`, or before the first what it grew from.

A champion's stored trajectories count where they fit exactly, else it is measured now. Trajectories are a function of
the weights, the problems, the world, and the settings of sampling; a key over all of these tells whether stored ones
still speak for it, so a new test set or another environment has it measured again. Measuring uses the same seeds as
`evaluate` used for the challenger, so that both meet the same random numbers. Those of the champion met last lie in
artifacts/promote, a version's own with it in the registry; left out: the verdict (`promote.py`).
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.problems import read_split
from tasks.records import Trajectory
from tasks.rollouts.options import DistributionSettings, EngineSettings, SamplingSettings
from tasks.settings import Paths, Settings
from tasks.storage import content_hash, json_hash, read_json, write_json, write_jsonl
from tasks.stored import read_trajectories
from tasks.terminal import warn

if TYPE_CHECKING:
    from tasks.challenger import Challenger
    from tasks.environments.base import Environment
    from tasks.promote import PromoteSettings
    from tasks.tracking.registry import Registry, Version


class Rival(NamedTuple):
    """Whom the challenger is compared with: the champion, or before the first one what it grew from.

    `differing_fields` are those in which its environment was another; its episodes are of today's all the same.
    """

    name: str
    weights: str
    trajectories: list[Trajectory]
    differing_fields: Sequence[str] = ()


def find_rival(
    settings: PromoteSettings,
    paths: Paths,
    challenger: Challenger,
    champion: Version | None,
    registry: Registry,
    environment: Environment,
) -> Rival:
    """The champion on today's `test`, its stored episodes where they fit; or the baseline a first one must beat."""
    from tasks.tracking.lineage import differing_fields

    if champion is None:
        return baseline(paths, challenger)
    key = episodes_key(settings, paths, challenger, champion.weights)
    played = stored_trajectories(paths, key)
    if played is None:
        played = registered_trajectories(registry, champion, key)
        if played is None:
            measured = measurement_settings(settings, challenger)
            played = measure_champion(champion, registry, environment, paths, **measured)
        store_trajectories(paths, key, played)
    fields = differing_fields(champion.tags, environment.describe())
    return Rival(f"the champion, version {champion.version}", champion.weights, played, fields)


def baseline(paths: Paths, challenger: Challenger) -> Rival:
    """The episodes of what a first champion must beat."""
    policy = baseline_policy(paths)
    weights = str(challenger.evaluation["weights"].get(policy, "none"))
    return Rival(f"the {policy.replace('_', ' ')}", weights, all_trajectories(episodes_file(paths, policy)))


def baseline_policy(paths: Paths) -> str:
    """What a first champion must beat: the warm start, or the base where no warm start was needed."""
    is_pointer = (paths.stage("warm_start") / "model" / "pointer.json").exists()
    return "base" if is_pointer else "warm_start"


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


def measurement_settings(settings: PromoteSettings, challenger: Challenger) -> dict[str, Any]:
    """What `evaluate` measured the challenger under, and the champion must be measured under too."""
    drawn_from = challenger.evaluation.get("sampling")  # an evaluation from before it was told drew as training does
    return {
        "engine": settings.engine,
        "sampling": settings.sampling.drawn_from(drawn_from and DistributionSettings(**drawn_from)),
        "seed": settings.seed,
        "samples_per_problem": challenger.result["samples_per_problem"],
        "num_threads": settings.num_threads,
    }


def episodes_key(settings: PromoteSettings, paths: Paths, challenger: Challenger, weights: str) -> str:
    measured = measurement_settings(settings, challenger)
    plain = {name: value.model_dump() if isinstance(value, Settings) else value for name, value in measured.items()}
    return measurement_key(
        paths, weights=weights, fingerprint=challenger.fingerprint, pin=challenger.pin, settings=plain
    )


def stored_trajectories(paths: Paths, key: str) -> list[Trajectory] | None:
    """promote/trajectories.jsonl, if trajectories.json says it was made under `key` and its bytes are unchanged."""
    file, note = _storage(paths)
    try:
        if read_json(note) != {"key": key, "content": content_hash(file)}:
            return None
    except ValueError:  # not there, or damaged: the champion is measured
        return None
    return all_trajectories(file)


def registered_trajectories(registry: Registry, champion: Version, key: str) -> list[Trajectory] | None:
    """The episodes its version keeps of its own evaluation, if they were made under `key`.

    They spare a new artifacts folder the measurement. Where they are gone or altered the champion is measured.
    """
    from tasks.tracking.registry import TRAJECTORIES_FILE

    if (registered_decision(registry, champion) or {}).get("measurement_key") != key:
        return None
    with TemporaryDirectory() as folder:
        file = _lineage_file(registry, champion, TRAJECTORIES_FILE, Path(folder))
        if file is None:
            return None
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            return [Trajectory.from_row(json.loads(line)) for line in stream]


def registered_decision(registry: Registry, champion: Version) -> dict[str, Any] | None:
    """The decision its version keeps, as decision.json has it but for the champion after; None where it has none."""
    with TemporaryDirectory() as folder:
        file = _lineage_file(registry, champion, "decision.json", Path(folder))
        return dict(read_json(file)) if file else None


def _lineage_file(registry: Registry, champion: Version, name: str, folder: Path) -> Path | None:
    """A file that is gone or altered is told of, and counts as none."""
    try:
        return registry.lineage_file(champion, name, folder)
    except ValueError as error:
        warn(f"warning: {error} It is not used.")
        return None


def store_trajectories(paths: Paths, key: str, trajectories: list[Trajectory]) -> None:
    """The note is written last and holds the file's hash: killed in between, it fits neither and is ignored."""
    file, note = _storage(paths)
    write_jsonl(file, (item.to_row() for item in trajectories))
    write_json(note, {"key": key, "content": content_hash(file)})


def episodes_file(paths: Paths, policy: str) -> Path:
    """What `evaluate` kept of a policy's episodes on `test`."""
    return paths.stage("evaluate") / "trajectories" / f"test_{policy}.jsonl"


def all_trajectories(file: Path) -> list[Trajectory]:
    return [trajectory for _, trajectory in read_trajectories(file)]


def _storage(paths: Paths) -> tuple[Path, Path]:
    folder = paths.stage("promote")
    return folder / "trajectories.jsonl", folder / "trajectories.json"
