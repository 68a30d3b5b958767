"""Episodes of any model on today's `test`, made under today's key: those that are kept where they fit, else played now.

A key names all that decides tokens (`measurement_key.py`), so two models with episodes of one key differ in nothing but
themselves. Episodes are kept in three places: where `evaluate` left them, with a registered version, and in
artifacts/promote under the key they were measured for. Bytes are compared with a hash before any of them counts. Left
out: who is compared with whom (`opponent.py`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.core.files import file_hash, read_json, write_json, write_jsonl
from tasks.core.records import Trajectory
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell, warn
from tasks.rollouts.settings import PlaySettings
from tasks.stages.evaluate.measurement_key import Parts, differing_parts, key_of, named
from tasks.stages.evaluate.results import all_trajectories, evaluated_episodes

if TYPE_CHECKING:
    from tasks.tools.base import Environment
    from tasks.tracking.registry import Registry
    from tasks.tracking.versions import Version

FOLDER = "episodes"  # in artifacts/promote


@dataclass(frozen=True, slots=True)
class Conditions:
    """What models are measured under on `test` today; `parts` is all of it, as the key names it."""

    paths: Paths
    environment: Environment
    parts: Parts
    play: PlaySettings

    def key(self, model: str) -> str:
        """The key of the episodes of the model with this hash."""
        return key_of(self.parts, model)


class Kept(NamedTuple):
    """Episodes somebody kept, and what they were made under. `read` gives None where they are not what was kept."""

    parts: Mapping[str, Any]
    read: Callable[[], list[Trajectory] | None]


class Episodes(NamedTuple):
    """One model's episodes of today's key. `differed_in` are the parts in which those kept before were of another key,
    which is why it was measured again; `file` has them, where they were measured for a promotion.
    """

    model: str
    trajectories: list[Trajectory]
    differed_in: list[str]
    file: Path | None = None

    def to_row(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "key": key_of(parts, self.model), "measured_again_for": self.differed_in}


def episodes_of_version(version: Version, registry: Registry, conditions: Conditions) -> Episodes:
    """The episodes of a registered version; its files are fetched, and compared with their hash, only to be played."""

    @contextmanager
    def fetched() -> Iterator[Path]:
        with TemporaryDirectory(dir=_folder(conditions.paths), prefix="model-") as folder:
            yield registry.fetch_model(version, Path(folder) / "model")

    kept = lambda: registered_episodes(registry, version)  # noqa: E731
    return _episodes(f"version {version.version}", version.identity, conditions, kept=kept, opened=fetched)


def episodes_of_policy(
    policy: str, model: str, folder: Callable[[], Path], evaluation: Mapping[str, Any], conditions: Conditions
) -> Episodes:
    """The episodes of a policy that `evaluate` measured (best, warm_start, base). `model` is the hash of its files as
    it is compared, `folder` gives them where they must be played. ValueError where a file is not what `evaluate` left.
    """
    kept = Kept(evaluation["measurement"]["parts"], lambda: evaluated_episodes(conditions.paths, evaluation, policy))
    name = f"the {policy.replace('_', ' ')}" if policy != "best" else str(evaluation["best_snapshot"])
    return _episodes(name, model, conditions, kept=lambda: kept, opened=lambda: nullcontext(folder()))


def _episodes(
    name: str,
    model: str,
    conditions: Conditions,
    *,
    kept: Callable[[], Kept | None],
    opened: Callable[[], AbstractContextManager[Path]],
) -> Episodes:
    """Where episodes are looked for, in order: measured for a promotion before, kept by somebody, played now."""
    key = conditions.key(model)
    stored = stored_trajectories(conditions.paths, key)
    if stored is not None:
        differed_in = read_json(_note(conditions.paths, key))["measured_again_for"]
        return Episodes(model, stored, differed_in, _file(conditions.paths, key))
    found, differed_in = kept(), []
    if found is not None:
        differed_in = differing_parts(found.parts, conditions.parts)
        trajectories = None if differed_in else found.read()
        if trajectories is not None:
            return Episodes(model, trajectories, [])
    if differed_in:
        tell(f"promote: {name} is measured again on test: its episodes are of other {named(differed_in)}")
    with opened() as folder:
        played = measure(folder, conditions, label=f"{name} on test")
    file = store_trajectories(conditions.paths, key, played, measured_again_for=differed_in)
    return Episodes(model, played, differed_in, file)


def measure(folder: Path, conditions: Conditions, *, label: str) -> list[Trajectory]:
    """Play the test problems with the model in a folder, as `evaluate` does."""
    from tasks.rollouts.collect import sample_episodes

    return sample_episodes(
        folder,
        conditions.environment,
        read_split(conditions.paths, "test"),
        conditions.play,
        stage="test",
        label=label,
    )


def stored_trajectories(paths: Paths, key: str) -> list[Trajectory] | None:
    """Those in artifacts/promote that were measured under `key`; None, and told, where they are not what was stored."""
    file, note = _file(paths, key), _note(paths, key)
    if not note.exists():
        return None
    try:
        told = read_json(note)
        if told["key"] == key and told["content"] == file_hash(file):
            return all_trajectories(file)
    except (ValueError, KeyError, TypeError):
        pass  # damaged, or half of the two
    warn(f"warning: {file} is not what was measured there, so it does not count. The model is measured again.")
    return None


def store_trajectories(
    paths: Paths, key: str, trajectories: list[Trajectory], *, measured_again_for: list[str]
) -> Path:
    """The note is written last and holds the file's hash: killed in between, it fits neither and does not count."""
    file = _file(paths, key)
    write_jsonl(file, (item.to_row() for item in trajectories))
    note = {"key": key, "content": file_hash(file), "measured_again_for": measured_again_for}
    write_json(_note(paths, key), note)
    return file


def registered_episodes(registry: Registry, version: Version) -> Kept | None:
    """The episodes a version keeps of its own measurement; None where it does not say what they were made under."""
    decision = registered_decision(registry, version) or {}
    measurement = decision.get("measurement") or {}
    return Kept(measurement["parts"], lambda: _unpacked(registry, version)) if "parts" in measurement else None


def _unpacked(registry: Registry, version: Version) -> list[Trajectory] | None:
    from tasks.tracking.versions import TRAJECTORIES_FILE

    with TemporaryDirectory() as folder:
        file = _lineage_file(registry, version, TRAJECTORIES_FILE, Path(folder))
        if file is None:
            return None
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            return [Trajectory.from_row(json.loads(line)) for line in stream]


def registered_decision(registry: Registry, version: Version) -> dict[str, Any] | None:
    """The decision its version keeps, as decision.json has it but for the champion after; None where it has none."""
    with TemporaryDirectory() as folder:
        file = _lineage_file(registry, version, "decision.json", Path(folder))
        return dict(read_json(file)) if file else None


def _lineage_file(registry: Registry, version: Version, name: str, folder: Path) -> Path | None:
    """A file that is gone or altered is told of, and counts as none."""
    try:
        return registry.lineage_file(version, name, folder)
    except ValueError as error:
        warn(f"warning: {error} It is not used.")
        return None


def _folder(paths: Paths) -> Path:
    folder = paths.stage("promote") / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _file(paths: Paths, key: str) -> Path:
    return _folder(paths) / f"{key[:16]}.jsonl"


def _note(paths: Paths, key: str) -> Path:
    return _folder(paths) / f"{key[:16]}.json"
