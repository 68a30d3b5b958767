"""Episodes of any model on today's `test` under today's key (`measurement_key.py`): kept ones, else played now.

They are kept where `evaluate` left them, with a registered version, and in artifacts/promote/episodes under their key.
They count only if their bytes have the recorded hash. A killed measurement goes on from the episodes that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tasks.core.files import file_hash, read_json, write_json, write_jsonl
from tasks.core.records import Trajectory
from tasks.core.resume import clear_resume, resume_root
from tasks.core.settings import Paths
from tasks.core.splits import read_split
from tasks.core.terminal import tell, warn
from tasks.core.workspace import as_shell_sees
from tasks.rollouts.settings import PlaySettings
from tasks.stages.evaluate.measurement_key import Parts, differing_parts, key_of, list_parts
from tasks.stages.evaluate.results import read_episodes
from tasks.tracking.model_uri import refuse_edited_version
from tasks.tracking.packed import unpack
from tasks.tracking.versions import DECISION_FILE, TRAJECTORIES_FILE, Version

if TYPE_CHECKING:
    from tasks.tools.base import Environment
    from tasks.tracking.journal import Journal
    from tasks.tracking.registry import Registry

ROOM = "promote"
Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Champion, journal, and what both sides are measured under on `test`; `parts` is the key without the model."""

    paths: Paths
    environment: Environment
    registry: Registry
    champion: Version | None
    journal: Journal
    play: PlaySettings
    parts: Parts

    def key(self, model: str) -> str:
        return key_of(self.parts, model)


class KeptEpisodes(NamedTuple):
    """Kept episodes and the parts of their key. `read` returns None where the file was altered."""

    parts: Mapping[str, Any]
    read: Callable[[], list[Trajectory] | None]


class Episodes(NamedTuple):
    """Episodes of today's key. `differed_in`: why kept ones did not fit; `file`: those measured for a promotion."""

    model: str
    trajectories: list[Trajectory]
    differed_in: list[str]
    file: Path | None = None

    def to_row(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "key": key_of(parts, self.model), "measured_again_for": self.differed_in}


def find_episodes(
    name: str,
    model: str,
    conditions: Conditions,
    kept: KeptEpisodes | None,
    open_folder: Callable[[], AbstractContextManager[Path]],
) -> Episodes:
    """The `kept` ones, else those measured for an earlier promotion, else played now. `model` is its files' hash."""
    key, differed_in = conditions.key(model), []
    if kept is not None:
        differed_in = differing_parts(kept.parts, conditions.parts)
        trajectories = None if differed_in else kept.read()
        if trajectories is not None:
            return Episodes(model, trajectories, [])
    stored = _read_stored(conditions.paths, key)
    if stored is not None:
        return Episodes(model, stored, differed_in, _file(conditions.paths, key))
    if differed_in:
        tell(f"promote: {name} is measured again on test: its episodes were made with other {list_parts(differed_in)}")
    with open_folder() as folder:
        played = measure(folder, conditions, key, label=f"{name} on test")
    file = _store(conditions.paths, key, played)
    clear_resume(ROOM, conditions.paths)
    return Episodes(model, played, differed_in, file)


def episodes_of_version(version: Version, conditions: Conditions) -> Episodes:
    """The episodes of a registered version. Its weights are fetched and verified only to be played."""

    @contextmanager
    def fetch() -> Iterator[Path]:
        with TemporaryDirectory(dir=_folder(conditions.paths), prefix="model-") as folder:
            yield conditions.registry.fetch_model(version, Path(folder) / "model")

    kept = registered_episodes(conditions.registry, version)
    return find_episodes(f"version {version.version}", version.identity, conditions, kept, fetch)


def measure(folder: Path, conditions: Conditions, key: str, *, label: str) -> list[Trajectory]:
    """Only what a measurement under the same key that was killed left unplayed."""
    from tasks.rollouts.collect import sample_episodes
    from tasks.rollouts.finished import FinishedEpisodes

    finished = FinishedEpisodes(resume_root(ROOM, conditions.paths) / key[:16] / "test.jsonl")
    return sample_episodes(
        folder,
        conditions.environment,
        read_split(conditions.paths, "test"),
        conditions.play,
        stage="test",
        label=label,
        finished=finished,
    )


def registered_episodes(registry: Registry, version: Version) -> KeptEpisodes | None:
    """The episodes kept with a version; None where their key was not recorded."""
    measurement = (registered_decision(registry, version) or {}).get("measurement") or {}
    if "parts" not in measurement:
        return None
    return KeptEpisodes(measurement["parts"], lambda: _read_registered(registry, version))


def registered_decision(registry: Registry, version: Version) -> dict[str, Any] | None:
    """The decision registered with its version: decision.json without the champion after it."""
    return _read_lineage(registry, version, DECISION_FILE, read_json)


def _read_registered(registry: Registry, version: Version) -> list[Trajectory] | None:
    return _read_lineage(registry, version, TRAJECTORIES_FILE, _unpack)


def _unpack(file: Path) -> list[Trajectory]:
    with TemporaryDirectory() as folder:
        return read_episodes(unpack(file, Path(folder) / "episodes.jsonl"))


def _read_lineage(registry: Registry, version: Version, name: str, read: Callable[[Path], Content]) -> Content | None:
    """None, with a warning, for a file that is gone or altered."""
    try:
        refuse_edited_version(registry, version)
        return registry.read_lineage(version, name, read)
    except ValueError as error:
        warn(f"warning: {error} It is not used.")
        return None


def _read_stored(paths: Paths, key: str) -> list[Trajectory] | None:
    """Episodes measured for a promotion under `key`; None, with a warning, where they were altered."""
    file, note = _file(paths, key), _note(paths, key)
    if not note.exists():
        return None
    try:
        recorded = read_json(note)
        if recorded["key"] == key and recorded["content"] == file_hash(file):
            return read_episodes(file)
    except (ValueError, KeyError, TypeError):
        pass  # damaged, or one of the two is missing
    warn(
        f"warning: {as_shell_sees(file)} was altered since it was measured, so it does not count. The model is "
        f"measured again."
    )
    return None


def _store(paths: Paths, key: str, trajectories: list[Trajectory]) -> Path:
    """The note with the file's hash comes last: after a kill in between, the file does not count."""
    file = _file(paths, key)
    write_jsonl(file, (item.to_row() for item in trajectories))
    write_json(_note(paths, key), {"key": key, "content": file_hash(file)})
    return file


def _folder(paths: Paths) -> Path:
    folder = paths.stage(ROOM) / "episodes"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _file(paths: Paths, key: str) -> Path:
    return _folder(paths) / f"{key[:16]}.jsonl"


def _note(paths: Paths, key: str) -> Path:
    return _folder(paths) / f"{key[:16]}.json"
