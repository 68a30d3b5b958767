"""Which model `serve` was told to serve, and where its alias leads now.

A folder and models:/NAME/3 stay what they are. models:/NAME@champion is looked up again and again: an alias that moved
in the middle of a promotion, or by hand, without the journal, is no decision and is not followed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tasks.core.files import json_hash
from tasks.models.folders import is_model, weights_hash
from tasks.tracking.aliases import TRANSITION, lock_registry
from tasks.tracking.model_uri import SCHEME, URI, check_alias, find_version
from tasks.tracking.registry import Registry
from tasks.tracking.versions import Version


@dataclass(frozen=True, slots=True)
class Found:
    """`version` is what replies say; `fetch` puts its files into `folder`, verified. Numbers begin again where a
    registered model was deleted, so a version is known by both.
    """

    version: str
    folder: Path
    fetch: Callable[[], Path]

    @property
    def key(self) -> tuple[str, Path]:
        return self.version, self.folder


class OneFolder:
    """A model folder, served as it is."""

    is_followed = False

    def __init__(self, folder: Path):
        self.folder, self.name = folder, Path(os.path.abspath(folder)).name  # of "." too

    def now(self) -> Found:
        return Found(f"{self.name}@{weights_hash(self.folder)[:12]}", self.folder, lambda: self.folder)

    def tidy(self, *kept: Path) -> None:
        """The folder is the user's."""


@dataclass
class Registered:
    """`models:/NAME@ALIAS` or `models:/NAME/NUMBER`, whose files come into `folder`, a folder for each version."""

    uri: str
    folder: Path
    address: str | None = None
    alias: str | None = field(init=False)
    registry: Registry = field(init=False)
    _was_moving: bool = False  # when it was last looked up

    def __post_init__(self) -> None:
        self.registry, self._first = find_version(self.uri, self.address)
        parts = URI.fullmatch(self.uri)
        assert parts is not None
        self.alias = parts["alias"]

    @property
    def name(self) -> str:
        return self.registry.model

    @property
    def is_followed(self) -> bool:
        return self.alias is not None

    def now(self) -> Found | None:
        """None while a promotion or a rollback is moving the aliases; what a killed one left half done is completed, as
        by every command that reads the registry. ValueError where the alias is gone, is not as
        recorded, or MLflow cannot be reached.
        """
        if self.alias is None:
            return self._found(self._first)
        if TRANSITION in self.registry.model_tags():
            if not self._was_moving:
                self._was_moving = True
                return None
            with lock_registry(self.registry):  # it was killed, or else we wait for it
                pass
        self._was_moving = False
        check_alias(self.registry, self.alias, quietly=True)
        version = self.registry.at(self.alias)
        if version is None:
            raise ValueError(f"{self.uri}: there is no such version any more.")
        return self._found(version)

    def tidy(self, *kept: Path) -> None:
        """Remove other versions: their files are in the registry."""
        for folder in self.folder.iterdir():
            if folder not in kept and folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)

    def _found(self, version: Version) -> Found:
        files = json_hash(version.identity)[:16]  # anybody can write the tag, so it is no path
        target = self.folder / f"{version.version}-{files}"
        return Found(f"{version.model}/{version.version}", target, lambda: self._fetch(version, target))

    def _fetch(self, version: Version, target: Path) -> Path:
        return target if target.is_dir() else self.registry.fetch_model(version, target)


Source = OneFolder | Registered


def open_source(source: str, folder: Path, address: str | None, *, decision: Path | None = None) -> Source:
    """ValueError in one line where there is no such model, which names the page of promote's last `decision`."""
    if source.startswith(SCHEME):
        try:
            return Registered(source, folder, address)
        except ValueError as error:
            if decision is None or not decision.exists():
                raise
            raise ValueError(
                f"{error} Promote's last decision is {decision}; `serve FOLDER` serves a model folder."
            ) from None
    place = Path(source)
    if not is_model(place):
        raise ValueError(
            f"{source}: is no model folder (it has no config.json, base.json or pointer.json), so there is nothing to "
            f"serve. Name a folder, models:/NAME@champion or models:/NAME/3."
        )
    return OneFolder(place)
